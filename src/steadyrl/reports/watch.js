// Keeps the page of `steadyrl watch` up to date, in place: the reader's scroll position and choices stay.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const line = document.getElementById("watch-state");
  const pageOf = (root) => Number(root.getElementById("watch-state").dataset.page);
  let shown = pageOf(document);

  // a report has three parts; the browser of rollouts in the middle runs a script and holds choices, so it stays as it is
  function parts(main) {
    const children = [...main.children];
    const place = (id) => children.findIndex((child) => child.id === id);
    const middle = place("section-rollouts"), end = place("section-configuration");
    const cut = middle < 0 ? end : middle;
    return { before: children.slice(0, cut), rollouts: children.slice(cut, end), after: children.slice(end) };
  }

  const rolloutData = (root) => root.querySelector("#rollout-data")?.textContent;
  const find = (nodes, selector) => nodes.flatMap((node) => [
    ...(node.matches(selector) ? [node] : []), ...node.querySelectorAll(selector)]);

  function carryOver(from, to) {
    const opened = find(from, "details"), panes = find(from, ".wide, pre");
    const kept = panes.map((pane) => [pane.scrollLeft, pane.scrollTop]);
    return () => {
      find(to, "details").forEach((fold, i) => { if (opened[i]) fold.open = opened[i].open; });
      find(to, ".wide, pre").forEach((pane, i) => { if (kept[i]) [pane.scrollLeft, pane.scrollTop] = kept[i]; });
    };
  }

  function renew(html) {
    const next = new DOMParser().parseFromString(html, "text/html");
    const old = parts(document.querySelector("main")), fresh = parts(next.querySelector("main"));
    const restores = [carryOver(old.before, fresh.before), carryOver(old.after, fresh.after)];
    const y = window.scrollY;
    old.before[0].before(...fresh.before);
    old.after[0].before(...fresh.after);
    [...old.before, ...old.after].forEach((node) => node.remove());
    restores.forEach((restore) => restore());
    window.scrollTo({ top: y, behavior: "instant" });
    document.getElementById("watch-reload").hidden = rolloutData(document) === rolloutData(next);
    shown = pageOf(next);
  }

  async function look() {
    try {
      const state = await (await fetch("/state")).json();
      if (state.page !== shown) renew(await (await fetch("/")).text());
      line.textContent = state.sentence;
    } catch {
      line.textContent = "steadyrl watch does not answer: it has ended, or the machine is busy";
    }
    setTimeout(look, EVERY_MS);
  }
  look();
})();
