// The rollout browser. Everything that a model wrote enters the page as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("rollout-data").textContent);
  const at = (id) => document.getElementById("rollout-" + id);
  const BLUE = "15, 127, 196", ORANGE = "213, 94, 0", PURPLE = "143, 111, 209";
  // letters of the clip rules: class of the token, and what it means
  const LETTERS = {
    ".": ["", "gradient kept"],
    "l": ["low", "gradient removed at the lower edge"],
    "h": ["high", "gradient removed at the upper edge"],
    "g": ["gated", "interval narrowed by SAT below 1, gradient kept"],
    "G": ["gated", "interval narrowed by SAT above 1, gradient kept"],
    "m": ["low gated", "gradient removed at the lower edge; narrowed by SAT as well"],
    "M": ["high gated", "gradient removed at the upper edge; narrowed by SAT as well"],
    "L": ["low gated", "gradient removed at the lower edge, by the narrowing alone"],
    "H": ["high gated", "gradient removed at the upper edge, by the narrowing alone"],
    " ": ["", "not sampled"],
  };
  let run, batch, rollout, chosen = -1;

  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const number = (value, digits) => value === null || value === undefined ? "-" : value.toPrecision(digits);
  const percent = (count, total) => total ? (100 * count / total).toPrecision(3) + "%" : "-";
  const isJudged = () => rollout.codes !== undefined;

  // control and direction characters are named: unnamed they would be invisible, or turn the text around
  const visible = (text) => text
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g,
      (c) => "\u27e8U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9")
    .replace(/\n/g, "\u23ce\n").replace(/\t/g, "\u21e5\t");

  function fill(select, labels, index) {
    select.replaceChildren(...labels.map((label, i) => {
      const option = element("option", label);
      option.value = i;
      return option;
    }));
    select.value = index;
  }

  function showRun(index) {
    run = data.runs[index];
    fill(at("batch"), run.batches.map((b) => b.title), run.batches.length - 1);
    const colours = ["log-ratio d", "probability under the engine", "lag", ...run.rules.map((rule) => rule.name)];
    const before = Math.min(Number(at("colour").value) || 0, colours.length - 1);
    fill(at("colour"), colours, before);
    if (run.batches.length) showBatch(run.batches.length - 1);
  }

  function showBatch(index) {
    batch = run.batches[index];
    fill(at("one"), batch.rollouts.map((r, i) => `${i + 1}. ${r.id}: ${r.status}`), 0);
    at("shown").textContent = `${batch.rollouts.length} of the batch's ${batch.total} rollouts are in this page. ${batch.note}`;
    if (batch.rollouts.length) showRollout(0);
  }

  function showRollout(index) {
    rollout = batch.rollouts[index];
    at("one").value = index;
    const drifts = (rollout.d || []).filter((d) => d !== null);
    const mean = drifts.length ? drifts.reduce((a, b) => a + b, 0) / drifts.length : null;
    const facts = [["prompt", rollout.id], ["status", rollout.status], ["reward", number(rollout.reward, 3)],
      ["advantage", number(rollout.advantage, 3)], ["sampled tokens", String(rollout.size)],
      ["mean d (log \u03c1)", number(mean, 3)]];
    at("facts").replaceChildren(...facts.map(([name, value]) => {
      const fact = element("span", name + " ");
      fact.append(element("b", value, name === "status" ? value : ""));
      return fact;
    }));
    at("prompt").textContent = visible(rollout.prompt || "");
    const tokens = at("tokens");
    if (rollout.tokens) {
      tokens.replaceChildren(...rollout.tokens.map((text, i) => {
        const token = element("span", visible(text) || "\u2205", "token");
        token.dataset.index = i;
        return token;
      }));
    } else {
      tokens.replaceChildren(element("span", visible(rollout.text)));
    }
    at("more").textContent = rollout.more
      ? `${rollout.more.toLocaleString("en")} more ${rollout.tokens ? "tokens" : "characters"} are not in this page.` : "";
    paint();
    choose(-1);
  }

  function paint() {
    const mode = Number(at("colour").value);
    const spans = at("tokens").querySelectorAll(".token");
    const scale = batch.scale || 1e-9;
    const oldest = Math.max(1, ...batch.rollouts.flatMap((r) => r.lag || []).map((lag) => lag || 0));
    spans.forEach((span, i) => {
      span.className = "token" + (Number(span.dataset.index) === chosen ? " chosen" : "");
      span.style.background = "";
      const tint = (colour, share) => { span.style.background = `rgba(${colour}, ${(0.75 * share).toFixed(3)})`; };
      if (mode === 0 && rollout.d[i] !== null)
        tint(rollout.d[i] < 0 ? BLUE : ORANGE, Math.min(1, Math.abs(rollout.d[i]) / scale));
      if (mode === 1 && rollout.mu[i] !== null) tint(PURPLE, 1 - rollout.mu[i]);
      if (mode === 2 && rollout.lag[i] !== null) tint(PURPLE, rollout.lag[i] / oldest);
      if (mode > 2 && isJudged()) span.className += " " + LETTERS[rollout.codes[mode - 3][i]][0];
    });
    at("key").replaceChildren(...legend(mode, scale, oldest));
  }

  function swatch(text, className, background) {
    const sample = element("span", text, "token " + className);
    if (background) sample.style.background = background;
    return sample;
  }

  function legend(mode, scale, oldest) {
    if (mode === 0) return batch.scale === null ? [element("span", "no trainer log-probabilities")]
      : [swatch(`d \u2264 -${number(scale, 2)}`, "", `rgba(${BLUE}, .75)`), element("span", "trained down"),
        swatch("0", "", ""), element("span", "trained up"), swatch(`d \u2265 ${number(scale, 2)}`, "", `rgba(${ORANGE}, .75)`)];
    if (mode === 1) return [swatch("0", "", `rgba(${PURPLE}, .75)`), element("span", "probability"), swatch("1", "", "")];
    if (mode === 2) return [swatch("0", "", ""), element("span", "lag"), swatch(String(oldest), "", `rgba(${PURPLE}, .75)`)];
    const rule = run.rules[mode - 3], parts = [element("span", rule.about + ".")];
    if (!isJudged()) return [...parts, element("span", "This rollout was not trained on.")];
    const letters = rollout.codes[mode - 3], q = rollout.q[mode - 3];
    if (q !== null) parts.push(element("span", `q ${number(q, 3)} in this optimizer step.`));
    const sampled = [...letters].filter((one) => one !== " ").length;
    for (const letter of ".lhgGmMLH") {
      const count = [...letters].filter((one) => one === letter).length;
      if (count) parts.push(swatch(`${count} (${percent(count, sampled)})`, LETTERS[letter][0]),
        element("span", LETTERS[letter][1]));
    }
    return parts;
  }

  function choose(index) {
    chosen = index;
    at("tokens").querySelectorAll(".chosen").forEach((span) => span.classList.remove("chosen"));
    const span = at("tokens").querySelector(`[data-index="${index}"]`);
    if (!span) {
      at("readout").textContent = rollout.tokens ? "Point at a token, or tap it, for its numbers." : "";
      return;
    }
    span.classList.add("chosen");
    const parts = [`token ${index + 1} of ${rollout.tokens.length}`];
    if (rollout.mu[index] === null) parts.push("not sampled");
    else {
      const d = rollout.d[index];
      parts.push(`probability under the engine ${number(rollout.mu[index], 3)}`, `d ${number(d, 3)}`,
        `ratio ${d === null ? "-" : number(Math.exp(d), 4)}`, `lag ${rollout.lag[index] === null ? "-" : rollout.lag[index]}`);
      if (isJudged()) run.rules.forEach((rule, i) => parts.push(`${rule.name}: ${LETTERS[rollout.codes[i][index]][1]}`));
    }
    at("readout").replaceChildren(element("b", visible(rollout.tokens[index])), element("span", parts.join(" \u00b7 ")));
  }

  const step = (by) => {
    const count = batch.rollouts.length;
    if (count) showRollout((Number(at("one").value) + by + count) % count);
  };
  at("run").addEventListener("change", (event) => showRun(Number(event.target.value)));
  at("batch").addEventListener("change", (event) => showBatch(Number(event.target.value)));
  at("one").addEventListener("change", (event) => showRollout(Number(event.target.value)));
  at("colour").addEventListener("change", paint);
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  for (const kind of ["click", "mouseover"]) at("tokens").addEventListener(kind, (event) => {
    const span = event.target.closest(".token");
    if (span) choose(Number(span.dataset.index));
  });
  at("tokens").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !rollout.tokens) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(rollout.tokens.length - 1, chosen + by)));
  });

  fill(at("run"), data.runs.map((r) => r.name), 0);
  at("run").parentElement.hidden = data.runs.length < 2;
  showRun(Math.max(0, data.runs.findIndex((r) => r.batches.length)));
  at("run").value = data.runs.indexOf(run);
})();
