// The page that scripts/report.py makes. Data becomes text by textContent alone: nothing of it runs.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------- making elements

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

// Characters that are not seen, or that turn others around, as their code; ends of lines as both
function visible(text) {
  const hidden = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
  return text.replace(hidden, (c) => {
    const code = c.codePointAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

function textBox(text, kind = "") {
  return make("div", { className: `text ${kind}`, dir: "auto" }, visible(text));
}

function table(heading, rows) {
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))));
  const head = make("tr", {}, ...heading.map((cell) => make("th", { scope: "col" }, cell)));
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, head, ...body));
}

function choice(label, options, onChange) {
  const items = options.map(([value, text]) => make("option", { value }, text));
  const select = make("select", { onchange: onChange }, ...items);
  return [make("label", {}, label, select), select];
}

function slider(label, length, onInput) {
  const range = make("input", { type: "range", min: 0, max: Math.max(0, length - 1), value: length - 1 });
  const output = make("output");
  range.addEventListener("input", onInput);
  return [make("label", {}, label, range, output), range, output];
}

// ------------------------------------------------------------------------------------------- head

function showHead() {
  byId("title").textContent = document.title = runs.map((run) => run.name).join(", ");
  const head = byId("head");
  runs.forEach((run, i) => {
    if (runs.length > 1) head.append(make("h3", { style: `color: var(--run${i % 6})` }, run.name));
    head.append(make("p", { className: "dim" }, `${run.args.exp_name}, ${run.args.model_name_or_path}`));
    for (const said of run.sentences) head.append(make("p", {}, said + "."));
  });
  if (data.table) head.append(make("pre", { className: "table", tabIndex: 0 }, data.table));
}

function finding([said, link, section]) {
  const box = make("div", { className: "finding" }, said + ". ");
  if (!section) return box;
  const more = make("details", {}, make("summary", {}, "It looks like: " + section.split("\n")[0]));
  more.append(textBox(section), make("a", { href: link }, "docs/failures.md"));
  box.append(more);
  return box;
}

function showHealth() {
  runs.forEach((run) => {
    if (runs.length > 1) byId("health").append(make("h3", {}, run.name));
    const rows = run.health.map((row) => {
      const figures = row.figures.map(([name, values]) =>
        make("div", {}, explained(name, "name"), " ", make("span", { className: "number" }, values)));
      const word = row.ill.length ? "⚠ ill" : "✓ nothing alarming";
      const verdict = make("div", {}, make("span", { className: "verdict" }, word), ...row.ill.map(finding));
      if (row.ill.length && row.then) verdict.append(make("div", { className: "dim" }, "Then: " + row.then));
      return [row.ask, make("div", {}, ...figures), row.usual, verdict];
    });
    const box = table(["ask", "this run, from its first step to its last", "usual", "verdict"], rows);
    [...box.querySelectorAll("tr")].slice(1).forEach((line, i) => {
      line.className = run.health[i].ill.length ? "ill" : "well";
    });
    byId("health").append(box);
  });
}

// ------------------------------------------------------------------------------------------ curves

// A metric's name, which says what it means if one points at it or comes to it by Tab
function explained(name, kind = "") {
  const whole = name.split("/").slice(0, 2).join("/");  // of what is split by data source
  const said = [name, `${whole}/NAME`, whole].map((key) => data.meanings[key]).find(Boolean);
  if (!said) return make("span", { className: kind }, name);
  const tip = make("span", { className: "tip", role: "tooltip", id: `tip${explained.count++}` }, said);
  const button = make("button", { type: "button", className: `explained ${kind}` }, name);
  button.setAttribute("aria-describedby", tip.id);
  return make("span", { className: "holder" }, button, tip);
}
explained.count = 0;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const charts = [];

function drawChart(box, title, names) {
  const lines = [];
  for (const name of names) {
    runs.forEach((run, number) => {
      const [steps, values] = run.curves[name] || [[], []];
      if (steps.length) lines.push({ name, number, steps, values });
    });
  }
  if (!lines.length) return;
  const heading = make("h3", {}, title, ...(title ? [make("br")] : []));
  names.forEach((name, i) => heading.append(i ? ", " : "", explained(name)));
  const figure = make("figure", { tabIndex: 0 }, heading);
  figure.setAttribute("aria-label", `${names.join(", ")}: arrows move, + and - zoom, Enter leads to rollouts`);
  box.append(figure);
  const dashes = [[], [6, 4], [2, 3]];
  const series = lines.map(({ name, number, steps }) => ({
    label: [runs.length > 1 ? runs[number].name : "", names.length > 1 || runs.length === 1 ? name : ""]
      .filter(Boolean).join(" "),
    stroke: () => colour(`--run${number % 6}`),
    dash: dashes[names.indexOf(name) % 3],
    width: 1.5,
    spanGaps: true,
    points: { show: steps.length < 30, size: 5 },
    value: (_, value) => (value == null ? "" : String(+value.toPrecision(4))),
  }));
  const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--line"), width: 1 } };
  const axes = [{ ...axis, size: 32 }, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => String(+tick.toPrecision(6))) }];
  const size = () => ({ width: Math.max(200, figure.clientWidth - 18), height: 190 });
  const options = {
    ...size(),
    series: [{ label: "step", value: (_, step) => (step == null ? "" : String(step)) }, ...series],
    scales: { x: { time: false } },
    axes,
    cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
  };
  const columns = uPlot.join(lines.map(({ steps, values }) => [steps, values]));
  const chart = new uPlot(options, columns, figure);
  charts.push(chart);
  new ResizeObserver(() => size().width !== chart.width && chart.setSize(size())).observe(figure);

  const leave = () => {  // to the rollouts of the step, of the run whose line is nearest
    const { idx, top } = chart.cursor;
    if (idx == null) return;
    const distance = (i) => Math.abs(chart.valToPos(columns[i + 1][idx], "y") - top);
    const there = lines.map((_, i) => i).filter((i) => columns[i + 1][idx] != null);
    there.sort((i, j) => distance(i) - distance(j));
    showStep(lines[there[0] ?? 0].number, columns[0][idx]);
  };
  let pressed = 0;
  chart.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  chart.over.addEventListener("click", (event) => { if (Math.abs(event.clientX - pressed) < 4) leave(); });
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure) return;
    const { min, max } = chart.scales.x;
    const idx = chart.cursor.idx ?? 0;
    const next = { ArrowLeft: idx - 1, ArrowRight: idx + 1, Home: 0, End: columns[0].length - 1 }[event.key];
    const middle = columns[0][idx];
    const zoom = { "+": 0.25, "-": 1 }[event.key];
    if (event.key === "Enter") leave();
    else if (zoom) {
      const reach = (max - min) * zoom;
      const ends = [columns[0][0], columns[0].at(-1)];
      chart.setScale("x", { min: Math.max(ends[0], middle - reach), max: Math.min(ends[1], middle + reach) });
    } else if (next !== undefined) {
      const x = columns[0][Math.min(Math.max(next, 0), columns[0].length - 1)];
      chart.setCursor({ left: chart.valToPos(x, "x"), top: 20 });
    } else return;
    event.preventDefault();
  });
}

function showCurves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const first = make("div", { className: "charts" });
  byId("curves").append(first);
  for (const [title, metrics] of data.panels) drawChart(first, title, metrics);
  const groups = new Set(names.map((name) => (name.includes("/") ? name.split("/")[0] : "progress")));
  for (const group of groups) {
    const inside = names.filter((name) => (name.includes("/") ? name.split("/")[0] : "progress") === group);
    const box = make("div", { className: "charts" });
    const details = make("details", {}, make("summary", {}, `${group}: ${inside.length} metrics`), box);
    details.addEventListener("toggle", () => {
      if (!box.childElementCount) for (const name of inside) drawChart(box, "", [name]);
    });
    byId("curves").append(details);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
}

// ----------------------------------------------------------------------------------------- answers

const words = { true: "✓ right", false: "✗ wrong", null: "not known" };

function verdictOf(row) {
  const kind = row.right === null ? "" : row.right ? "right" : "wrong";
  return make("div", {}, make("b", { className: kind }, words[row.right]), ` ${row.figures}`);
}

function showAnswers() {
  const box = byId("answers");
  const prompts = data.answers;
  if (!prompts.length) return box.append(make("p", {}, "No evaluation has been written."));
  const every = prompts.flatMap((prompt) => prompt[3].flat());
  const versions = [...new Set(every.map((row) => row.version))].sort((a, b) => a - b);
  const sources = [...new Set(prompts.map((prompt) => prompt[2]))];
  let most = 20;
  const restart = () => { most = 20; update(); };
  const [evaluation, range, output] = slider("after steps", versions.length, restart);
  const [shown, filter] = choice("show", [["", "all"], ["true", "right"], ["false", "wrong"], ["null", "not known"], ["lost", "wrong, and right before"]], restart);
  const orders = [["", "as asked"], ["score", "lowest score"], ["-score", "highest score"], ["length", "shortest"], ["-length", "longest"]];
  const [sorted, order] = choice("sort by", orders, restart);
  const [ofSource, source] = choice("data source", [["", "all"], ...sources.map((name) => [name, name])], restart);
  const search = make("input", { type: "search", oninput: restart });
  const count = make("p", { className: "note", role: "status" });
  const list = make("div", { className: runs.length > 1 ? "" : "cards" });
  const more = make("button", { type: "button", onclick: () => { most += 20; update(); } }, "Show more");
  const controls = [evaluation, shown, sorted, make("label", {}, "search", search)];
  if (sources.length > 1) controls.push(ofSource);
  box.append(make("div", { className: "controls" }, ...controls), count, list, more);

  function update() {
    const version = versions[range.value];
    output.value = version;
    const now = (rows) => rows.findLast((row) => row.version <= version);
    const passes = ([prompt, truth, from, answers]) => {
      const there = answers.map(now).filter(Boolean);
      const wasRight = (rows) => rows.some((row) => row.right && row.version < version);
      const wanted = !filter.value || answers.some((rows) => {
        const row = now(rows);
        return row && (filter.value === "lost" ? row.right === false && wasRight(rows) : String(row.right) === filter.value);
      });
      const texts = [prompt, truth, ...there.map((row) => row.text)].join("\n").toLowerCase();
      return there.length && wanted && (!source.value || from === source.value) && texts.includes(search.value.toLowerCase());
    };
    const found = prompts.filter(passes);
    if (order.value) {
      const key = order.value.replace("-", "");
      const sign = order.value[0] === "-" ? -1 : 1;
      const value = ([, , , answers]) => answers.map(now).find(Boolean)[key] ?? -Infinity;
      found.sort((a, b) => sign * (value(a) - value(b)));
    }
    count.textContent = `${found.length} of ${prompts.length} prompts` +
      (prompts.length < data.asked ? `; ${data.asked} were asked, evenly spaced ones fit into this page` : "");
    more.hidden = found.length <= most;
    list.replaceChildren(...found.slice(0, most).map(([prompt, truth, from, answers]) => {
      const columns = answers.map((rows, i) => {
        const row = now(rows);
        const name = runs.length > 1 ? make("h3", { style: `color: var(--run${i % 6})` }, runs[i].name) : null;
        if (!row) return make("div", {}, name, "was not asked");
        const scores = rows.map((each) => `${each.version}: ${each.score ?? "none"}`).join(" · ");
        return make("div", { tabIndex: 0 }, name, verdictOf(row), textBox(row.text), make("div", { className: "history" }, `score by steps: ${scores}`));
      });
      const known = truth === "None" ? null : textBox(`Ground truth: ${truth}`, "dim");
      const where = sources.length > 1 ? make("div", { className: "dim" }, from) : null;
      return make("div", { className: "card" }, textBox(prompt, "prompt"), known, where, make("div", { className: "beside" }, ...columns));
    }));
  }
  update();
}

// ---------------------------------------------------------------------------------------- rollouts

// What tokens can be coloured by: its name, and its value from a response's numbers at a place
const known = {
  advantages: ["advantage", (n, i) => n.advantages?.[i]],
  mismatch: ["learner minus sampler (log-probability)", (n, i) => minus(n.logprobs?.[i], n.sampler_logprobs?.[i])],
  logprobs: ["log-probability, learner's before the updates", (n, i) => n.logprobs?.[i]],
  sampler_logprobs: ["log-probability, sampler's", (n, i) => n.sampler_logprobs?.[i]],
  entropies: ["entropy", (n, i) => n.entropies?.[i]],
  values: ["value", (n, i) => n.values?.[i]],
  returns: ["return", (n, i) => n.returns?.[i]],
  rewards: ["reward", (n, i) => n.rewards?.[i]],
  kl: ["KL to the reference (log-ratio)", (n, i) => minus(n.logprobs?.[i], n.ref_logprobs?.[i])],
};
const minus = (a, b) => (a == null || b == null ? null : +(a - b).toFixed(4));
let showStep = () => {};

function showRollouts() {
  const box = byId("rollouts");
  if (!runs.some((run) => run.steps.length)) return box.append(make("p", {}, "No response has been written."));
  const names = new Set(runs.flatMap((run) => run.steps.flatMap((step) => step.groups.flatMap((group) => group.rows.flatMap((row) => Object.keys(row.numbers ?? {}))))));
  for (const name of names) known[name] ??= [name, (n, i) => n[name]?.[i]];  // a fork's own
  const [ofRun, runChoice] = choice("run", runs.map((run, i) => [i, run.name]), () => showStep(+runChoice.value, run().steps.at(-1)?.step, true));
  const run = () => runs[runChoice.value];
  const [stepLabel, range, output] = slider("step", 1, () => update());
  const options = Object.entries(known).filter(([name]) => name !== "versions").map(([name, [said]]) => [name, said]);
  const [colourLabel, quantity] = choice("colour tokens by", options, () => update());
  const ends = [make("span"), make("span")];
  const legend = make("div", { className: "legend" }, ends[0], make("i"), ends[1], make("span", { className: "dim" }, "0 in the middle has no colour"));
  const note = make("p", { className: "note" });
  const list = make("div");
  const panel = make("div", { id: "panel", hidden: true, role: "status" });
  box.append(note, make("div", { className: "controls" }, runs.length > 1 ? ofRun : null, stepLabel, colourLabel), legend, list, panel);

  showStep = (number, step, stay) => {
    runChoice.value = number;
    const steps = run().steps.map((each) => Math.abs(each.step - step));
    range.max = Math.max(0, steps.length - 1);
    range.value = steps.indexOf(Math.min(...steps));
    update();
    if (!stay) { box.scrollIntoView(); range.focus({ preventScroll: true }); }
  };

  function update() {
    const shown = run().steps[range.value];
    panel.hidden = true;
    note.textContent = `${run().note}. A box is a special token, ■ the stop token, italic an observation, an underline changes with the version of the weights. Point at a token or reach it by Tab and arrows.`;
    output.value = shown ? shown.step : "none";
    const rows = shown ? shown.groups.flatMap((group) => group.rows) : [];
    const value = known[quantity.value][1];
    const sizes = rows.flatMap((row) => (row.ids ?? []).map((_, i) => Math.abs(value(row.numbers, i) ?? 0))).sort((a, b) => a - b);
    const largest = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 0;
    ends[0].textContent = largest ? `${+(-largest).toPrecision(3)} or less` : `nothing but 0, or not computed`;
    ends[1].textContent = largest ? `${+largest.toPrecision(3)} or more` : "";
    list.className = rows.length > shown?.groups.length ? "" : "cards";
    list.replaceChildren(...(shown ? shown.groups : []).map((group) => {
      const columns = group.rows.map((row) => make("div", {}, verdictOf(row), showTokens(row, value, largest)));
      return make("div", { className: "card" }, textBox(group.prompt, "prompt"), ...group.truth.map((said) => textBox(said, "dim")), make("div", { className: "beside" }, ...columns));
    }));
  }

  function showTokens(row, value, largest) {
    if (!row.ids) return make("div", {}, textBox(row.text), make("p", { className: "note" }, "Of this step the text alone was kept."));
    const box = make("div", { className: "tokens", dir: "auto" });
    const { numbers, ids } = row;
    const missing = row.ids.every((_, i) => value(numbers, i) == null);
    if (missing) box.append(make("div", { className: "note" }, `${known[quantity.value][0]}: not computed`));
    ids.forEach((id, i) => {
      const text = row.texts[i] === null ? "·" : visible(row.texts[i]).replace(/\n/g, "↵\n") || "∅";
      const last = i === ids.length - 1 && row.stopped;
      const token = make("span", { tabIndex: i ? -1 : 0 }, last ? `${text}■` : text);
      token.dataset.i = i;
      const number = value(numbers, i);
      const strength = largest && number ? Math.min(1, Math.abs(number) / largest) * 0.75 : 0;
      if (strength) token.style.backgroundColor = `rgba(var(${number < 0 ? "--below" : "--above"}), ${strength.toFixed(3)})`;
      if (last || run().special.includes(id)) token.classList.add("special");
      if (row.observed.includes(i)) token.classList.add("observed");
      const version = numbers.versions?.[i];
      if (version != null) {
        token.classList.add(version % 2 ? "odd" : "even");
        if (version !== numbers.versions[i - 1]) box.append(make("sup", {}, `v${version}`));
      }
      if (row.gap && i === Math.floor(ids.length / 2)) box.append(make("span", { className: "gap" }, ` … ${row.gap} tokens are left out … `));
      box.append(token);
    });
    box.addEventListener("mouseover", (event) => tell(row, event.target));
    box.addEventListener("focusin", (event) => tell(row, event.target));
    box.addEventListener("keydown", (event) => {
      const all = box.querySelectorAll("[data-i]");
      const i = +event.target.dataset.i;
      const next = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: all.length - 1 }[event.key];
      if (next === undefined || !all[next]) return;
      event.preventDefault();
      event.target.tabIndex = -1;
      all[next].tabIndex = 0;
      all[next].focus();
    });
    return box;
  }

  function tell(row, token) {
    const i = token.dataset?.i;
    if (i === undefined) return;
    const said = Object.entries(known).map(([, [name, value]]) => [name, value(row.numbers, i)]);
    const parts = said.map(([name, number]) => make("span", { className: "number" }, `${name}: ${number ?? "not computed"}`));
    const kind = row.observed.includes(+i) ? ", observed" : "";
    panel.replaceChildren(make("b", {}, token.textContent.replaceAll("\n", "")), make("span", {}, `id ${row.ids[i]}, token ${+i + 1}${kind}`), ...parts);
    panel.hidden = false;
  }
  box.addEventListener("keydown", (event) => { if (event.key === "Escape") panel.hidden = true; });
  const first = runs.findIndex((each) => each.steps.length);
  showStep(first, Number.MAX_SAFE_INTEGER, true);
}

// --------------------------------------------------------------------------------------- arguments

function showArguments() {
  runs.forEach((run) => {
    const box = byId("arguments");
    if (runs.length > 1) box.append(make("h3", {}, run.name));
    const { command = [], commit, versions = {} } = run.args.provenance ?? {};
    const said = Object.entries({ commit, ...versions }).map((each) => each.join(" "));
    box.append(make("pre", { tabIndex: 0 }, command.join(" ")), make("p", {}, said.join(", ")));
    const same = (name) => JSON.stringify(run.args[name]) === JSON.stringify(run.defaults[name]);
    const other = Object.keys(run.defaults).filter((name) => name in run.args && !same(name));
    const rows = other.map((name) => [name, String(run.args[name]), String(run.defaults[name])]);
    box.append(table(["differs from its default", "value", "default"], rows));
  });
}

for (const show of [showHead, showHealth, showCurves, showAnswers, showRollouts, showArguments]) show();
