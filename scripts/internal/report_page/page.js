// The page that scripts/report.py writes. Data only becomes text (textContent), so none of it runs.
"use strict";
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const runs = data.runs;

// -------------------------------------------------------------------------------- making elements

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

const div = (className, ...children) => make("div", { className }, ...children);

// Characters that are invisible, or that reverse others, are shown as their code
const UNSEEN = /(?!\n)[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

function visible(text) {
  return text.replace(UNSEEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

const textBox = (text, kind = "") => div(`text ${kind}`, visible(text));

function table(heading, rows) {
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))));
  const head = make("tr", {}, ...heading.map((cell) => make("th", { scope: "col" }, cell)));
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, head, ...body));
}

// The name of a run in its colour, if there are several runs
function nameOf(number) {
  if (runs.length === 1) return null;
  return make("h3", { style: `color: var(--run${number % 6})` }, runs[number].name);
}

function setOptions(select, options) {
  select.append(...options.map(([value, text]) => make("option", { value }, text)));
  select.parentElement.hidden = select.options.length < 2 + (select.value === "");
}

// ----------------------------------------------------------------------------------------- head

function showHead() {
  byId("title").textContent = document.title = runs.map((run) => run.name).join(", ");
  const head = byId("head");
  runs.forEach((run, i) => {
    const model = div("dim", `${run.args.exp_name}, ${run.args.model_name_or_path}`);
    const sentences = run.sentences.map((sentence) => make("p", {}, sentence + "."));
    head.append(nameOf(i) ?? "", model, ...sentences);
  });
  if (data.table) head.append(make("pre", { className: "table", tabIndex: 0 }, data.table));
}

function finding([sign, link, bug]) {
  if (!bug) return div("finding", sign + ".");
  const page = make("a", { href: link }, "docs/bug_gallery.md");
  return div("finding", sign + ".", div("", `It looks like ${bug}. `, page));
}

function showHealth() {
  runs.forEach((run, number) => {
    const rows = run.health.map((row) => {
      const figures = row.figures.map(([name, values]) =>
        div("", explained(name, "name"), " ", make("span", { className: "number" }, values)));
      const word = row.signs.length ? "⚠ warning sign" : "✓ no warning sign";
      const remedy = row.signs.length ? div("dim", row.remedy + ".") : null;
      const verdict = div("", div("verdict", word), ...row.signs.map(finding), remedy);
      return [row.question, div("", ...figures), row.usual, verdict];
    });
    const heading = ["question", "this run, from the first step to the last"];
    const box = table([...heading, "in a healthy run", "verdict"], rows);
    [...box.querySelectorAll("tr")].slice(1).forEach((line, i) => {
      line.className = run.health[i].signs.length ? "unhealthy" : "healthy";
    });
    byId("health").append(nameOf(number) ?? "", box);
  });
  byId("health").append(make("p", { className: "note" }, data.validation_note));
}

// ---------------------------------------------------------------------------------------- curves

// A metric's name, with what it means if you point at it or reach it with Tab
function explained(name, kind = "") {
  const whole = name.split("/").slice(0, 2).join("/");  // without the data source
  const meaning = [name, `${whole}/NAME`, whole].map((key) => data.meanings[key]).find(Boolean);
  if (!meaning) return make("span", { className: kind }, name);
  const tip = make("span", { className: "tip" }, meaning);
  return make("button", { type: "button", className: `explained ${kind}` }, name, tip);
}

const charts = [];
const paint = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawChart(box, title, names) {
  const lines = names.flatMap((name) => runs.map((run, number) => {
    const [steps, values] = run.curves[name] ?? [[], []];
    return { name, number, steps, values };
  })).filter(({ steps }) => steps.length);
  if (!lines.length) return;
  const heading = make("h3", {}, title, ...(title ? [make("br")] : []));
  names.forEach((name, i) => heading.append(i ? ", " : "", explained(name)));
  const figure = make("figure", { tabIndex: 0 }, heading);
  const keys = "arrow keys move, + and - zoom, Enter shows the rollouts";
  figure.setAttribute("aria-label", `${names.join(", ")}: ${keys}`);
  box.append(figure);
  const dashes = [[], [6, 4], [2, 3]];
  const series = lines.map(({ name, number, steps }) => ({
    label: runs.length === 1 ? name : `${runs[number].name}${names.length > 1 ? ` ${name}` : ""}`,
    stroke: () => paint(`--run${number % 6}`),
    dash: dashes[names.indexOf(name) % 3],
    width: 1.5,
    spanGaps: true,
    points: { show: steps.length < 30, size: 5 },
    value: (_, value) => (value == null ? "" : String(+value.toPrecision(4))),
  }));
  const axis = { stroke: () => paint("--dim"), grid: { stroke: () => paint("--line"), width: 1 } };
  const written = (_, ticks) => ticks.map((tick) => String(+tick.toPrecision(6)));
  const axes = [{ ...axis, size: 32 }, { ...axis, size: 62, values: written }];
  const size = () => ({ width: Math.max(200, figure.clientWidth - 18), height: 190 });
  const step = { label: "step", value: (_, value) => String(value ?? "") };
  const cursor = { sync: { key: "step" } };
  const scales = { x: { time: false } };
  const options = { ...size(), series: [step, ...series], axes, cursor, scales };
  const columns = uPlot.join(lines.map(({ steps, values }) => [steps, values]));
  const chart = new uPlot(options, columns, figure);
  charts.push(chart);
  new ResizeObserver(() => size().width !== chart.width && chart.setSize(size())).observe(figure);

  const leave = () => {  // show the rollouts of the step, from the run whose line is nearest
    const { idx, top } = chart.cursor;
    if (idx == null) return;
    const distance = (i) => Math.abs(chart.valToPos(columns[i + 1][idx], "y") - top);
    const there = lines.map((_, i) => i).filter((i) => columns[i + 1][idx] != null);
    there.sort((i, j) => distance(i) - distance(j));
    showStep(lines[there[0] ?? 0].number, columns[0][idx]);
  };
  let pressed = 0;
  chart.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  chart.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - pressed) < 4) leave();  // it was no zoom
  });
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure) return;
    const steps = columns[0];
    const idx = chart.cursor.idx ?? 0;
    const places = { ArrowLeft: idx - 1, ArrowRight: idx + 1, Home: 0, End: steps.length - 1 };
    const step = steps[places[event.key]];
    const reach = (chart.scales.x.max - chart.scales.x.min) * { "+": 0.25, "-": 1 }[event.key];
    if (event.key !== "Enter" && step === undefined && !reach) return;
    event.preventDefault();
    if (event.key === "Enter") leave();
    if (step !== undefined) chart.setCursor({ left: chart.valToPos(step, "x"), top: 20 });
    if (!reach) return;
    const [min, max] = [steps[idx] - reach, steps[idx] + reach];
    chart.setScale("x", { min: Math.max(steps[0], min), max: Math.min(steps.at(-1), max) });
  });
}

function showCurves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const first = div("charts");
  byId("curves").append(first);
  for (const [title, metrics] of data.panels) drawChart(first, title, metrics);
  const groupOf = (name) => (name.includes("/") ? name.split("/")[0] : "progress");
  for (const group of new Set(names.map(groupOf))) {
    const inside = names.filter((name) => groupOf(name) === group);
    const box = div("charts");
    const summary = make("summary", {}, `${group}: ${inside.length} metrics`);
    const details = make("details", {}, summary, box);
    details.addEventListener("toggle", () => {
      if (!box.childElementCount) inside.forEach((name) => drawChart(box, "", [name]));
    });
    byId("curves").append(details);
  }
  const redraw = () => charts.forEach((chart) => chart.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

// --------------------------------------------------------------------------------------- answers

const words = { true: ["right", "✓ correct"], false: ["wrong", "✗ incorrect"], null: ["", ""] };

function verdictOf(row) {
  const [className, word] = words[row.right];
  return div("", make("b", { className }, word), ` ${visible(row.figures)}`);
}

function showAnswers() {
  const prompts = data.answers;
  if (!prompts.length) return byId("answers").replaceChildren("The run has written no evaluation yet.");
  const [filter, order, source, search] = ["filter", "order", "source", "search"].map(byId);
  const range = byId("evaluation");
  const rowsOfAll = prompts.flatMap((prompt) => prompt[3].flat());
  const versions = [...new Set(rowsOfAll.map((row) => row.policy_version))].sort((a, b) => a - b);
  const sources = [...new Set(prompts.map((prompt) => prompt[2]))];
  setOptions(source, sources.map((name) => [name, name]));
  range.max = range.value = versions.length - 1;
  let shownPrompts = 20;
  for (const control of [range, filter, order, source, search]) {
    control.addEventListener("input", () => { shownPrompts = 20; update(); });
  }
  byId("more").addEventListener("click", () => { shownPrompts += 20; update(); });
  byId("prompts").className = runs.length > 1 ? "" : "cards";

  const now = (rows) => rows.findLast((row) => row.policy_version <= versions[range.value]);

  function isWanted(rows) {
    const row = now(rows);
    if (!row || !filter.value) return Boolean(row);
    if (filter.value !== "lost") return String(row.right) === filter.value;
    return row.right === false && rows.slice(0, rows.indexOf(row)).some((earlier) => earlier.right);
  }

  function passes([prompt, truth, from, answers]) {
    const texts = [prompt, truth, ...answers.map((rows) => now(rows)?.text ?? "")].join("\n");
    const hasText = texts.toLowerCase().includes(search.value.toLowerCase());
    return hasText && answers.some(isWanted) && (!source.value || from === source.value);
  }

  function card([prompt, truth, from, answers]) {
    const columns = answers.map((rows, i) => {
      const row = now(rows);
      if (!row) return div("", nameOf(i), "This run has no answer.");
      const score = (answer) => answer.score ?? "none (the reward failed)";
      const scores = rows.map((answer) => `${answer.policy_version}: ${score(answer)}`);
      const history = div("history", `score by steps: ${scores.join(" · ")}`);
      return div("", nameOf(i), verdictOf(row), textBox(row.text), history);
    });
    const known = truth === "None" ? null : textBox(`Ground truth: ${truth}`, "dim");
    const where = sources.length > 1 ? div("dim", from) : null;
    return div("card", textBox(prompt, "prompt"), known, where, div("beside", ...columns));
  }

  function update() {
    range.nextElementSibling.value = versions[range.value];
    const found = prompts.filter(passes);
    const key = order.value.replace("-", "");
    const sign = order.value[0] === "-" ? -1 : 1;
    const value = (prompt) => prompt[3].map(now).find(Boolean)[key] ?? -Infinity;
    if (key) found.sort((a, b) => sign * (value(a) - value(b)));
    const left = prompts.length < data.num_prompts ? `; the page has no room for the others of ${data.num_prompts}` : "";
    byId("count").textContent = `${found.length} of ${prompts.length} prompts${left}`;
    byId("more").hidden = found.length <= shownPrompts;
    byId("prompts").replaceChildren(...found.slice(0, shownPrompts).map(card));
  }
  update();
}

// -------------------------------------------------------------------------------------- rollouts

// What tokens can be coloured by: its name, and its value at a position of a response
const minus = (a, b) => (a == null || b == null ? null : +(a - b).toFixed(4));
const quantities = {
  advantages: ["advantage"],
  mismatch: ["learner minus sampler", (n, i) => minus(n.logprobs?.[i], n.sampler_logprobs?.[i])],
  logprobs: ["log-probability by the learner"],
  sampler_logprobs: ["log-probability by the sampler"],
  entropies: ["entropy"],
  values: ["value"],
  returns: ["return"],
  rewards: ["reward"],
  kl_rewards: ["reward by the KL penalty"],
  kl: ["KL to the reference (log-ratio)", (n, i) => minus(n.logprobs?.[i], n.ref_logprobs?.[i])],
};
let showStep = () => {};  // (index of a run, step, whether to keep the scroll position)

function showRollouts() {
  const [run, range, quantity, panel] = ["run", "step", "quantity", "panel"].map(byId);
  if (!runs.some(({ steps }) => steps.length)) {
    return byId("rollouts").replaceChildren("The run has written no response yet.");
  }
  const groupsOfAll = runs.flatMap(({ steps }) => steps.flatMap((step) => step.groups));
  const rowsOfAll = groupsOfAll.flatMap((group) => group.rows);
  for (const name of rowsOfAll.flatMap((row) => Object.keys(row.numbers ?? {}))) {
    quantities[name] ??= [name];  // a quantity that only a fork has
  }
  const valueOf = (name) => quantities[name][1] ?? ((numbers, i) => numbers[name]?.[i]);
  setOptions(run, runs.map(({ name }, i) => [i, name]));
  setOptions(quantity, Object.entries(quantities).map(([name, [title]]) => [name, title]));
  run.addEventListener("input", () => showStep(run.value, 1e15, true));
  range.addEventListener("input", update);
  quantity.addEventListener("input", update);
  addEventListener("keydown", (event) => { if (event.key === "Escape") panel.hidden = true; });

  showStep = (number, step, stays) => {
    run.value = number;
    const distances = runs[number].steps.map((shown) => Math.abs(shown.step - step));
    range.max = Math.max(0, distances.length - 1);
    range.value = distances.indexOf(Math.min(...distances));
    update();
    if (stays) return;
    byId("rollouts").scrollIntoView();
    range.focus({ preventScroll: true });
  };

  function update() {
    const shown = runs[run.value].steps[range.value] ?? { step: "none", groups: [] };
    const rows = shown.groups.flatMap((group) => group.rows);
    const value = valueOf(quantity.value);
    panel.hidden = true;
    byId("note").textContent = `${runs[run.value].note}.`;
    range.nextElementSibling.value = shown.step;
    const values = rows.flatMap((row) => (row.ids ?? []).map((_, i) => value(row.numbers, i)));
    const sizes = values.map((number) => Math.abs(number ?? 0)).sort((a, b) => a - b);
    // Scale by the 98th percentile, so that a few extreme tokens do not fade the others
    const largest = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 0;
    const end = +largest.toPrecision(3);
    byId("least").textContent = end ? `-${end} or less` : "all are 0, or not computed";
    byId("greatest").textContent = end ? `${end} or more` : "";
    const groups = byId("groups");
    groups.className = rows.length > shown.groups.length ? "" : "cards";
    groups.replaceChildren(...shown.groups.map((group) => {
      const tokens = (row) => showTokens(row, value, largest);
      const columns = group.rows.map((row) => div("", verdictOf(row), tokens(row)));
      const truth = group.truth.map((line) => textBox(line, "dim"));
      return div("card", textBox(group.prompt, "prompt"), ...truth, div("beside", ...columns));
    }));
  }

  function showToken(row, i, number, largest) {
    const { ids, texts, numbers } = row;
    const isEnd = i === ids.length - 1 && row.stopped;
    const text = texts[i] === null ? "·" : visible(texts[i]).replaceAll("\n", "↵\n") || "∅";
    const token = make("span", { tabIndex: i ? -1 : 0 }, isEnd ? `${text}■` : text);
    token.dataset.i = i;
    const share = largest && number ? Math.min(1, Math.abs(number) / largest) * 0.75 : 0;
    const side = number < 0 ? "--below" : "--above";
    if (share) token.style.backgroundColor = `rgba(var(${side}), ${share.toFixed(3)})`;
    if (isEnd || runs[run.value].special.includes(ids[i])) token.classList.add("special");
    if (row.observed.includes(i)) token.classList.add("observed");
    const version = numbers.versions?.[i];
    if (version == null) return [token];
    token.classList.add(version % 2 ? "odd" : "even");
    return version === numbers.versions[i - 1] ? [token] : [make("sup", {}, `v${version}`), token];
  }

  function showTokens(row, value, largest) {
    const note = "rollouts.jsonl has no tokens of this response.";
    if (!row.ids) return div("", textBox(row.text), div("note", note));
    const box = div("tokens");
    const values = row.ids.map((_, i) => value(row.numbers, i));
    if (values.every((number) => number == null)) box.append(div("note", "not computed"));
    values.forEach((number, i) => {
      if (row.gap && i === Math.floor(values.length / 2)) {
        box.append(make("span", { className: "gap" }, ` … ${row.gap} tokens not shown … `));
      }
      box.append(...showToken(row, i, number, largest));
    });
    box.addEventListener("mouseover", (event) => showNumbers(row, event.target));
    box.addEventListener("focusin", (event) => showNumbers(row, event.target));
    box.addEventListener("keydown", (event) => {
      const tokens = box.querySelectorAll("[data-i]");
      const i = +event.target.dataset.i;
      const places = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: tokens.length - 1 };
      const next = tokens[places[event.key]];
      if (!next) return;
      event.preventDefault();
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
    return box;
  }

  function showNumbers(row, token) {
    const i = token.dataset.i;
    if (i === undefined) return;
    const numbers = Object.entries(quantities).map(([name, [title]]) => {
      const text = `${title}: ${valueOf(name)(row.numbers, i) ?? "not computed"}`;
      return make("span", { className: "number" }, text);
    });
    const text = make("b", {}, token.textContent.replaceAll("\n", ""));
    panel.replaceChildren(text, `id ${row.ids[i]}, token ${+i + 1}`, ...numbers);
    panel.hidden = false;
  }
  showStep(runs.findIndex(({ steps }) => steps.length), 1e15, true);  // the last step
}

// --------------------------------------------------------------------------------------- command

function showCommand() {
  runs.forEach((run, number) => {
    const box = byId("command");
    box.append(nameOf(number) ?? "");
    const { commit, versions = {} } = run.args.provenance ?? {};
    const facts = Object.entries({ commit, ...versions }).map((pair) => pair.join(" "));
    box.append(make("pre", { tabIndex: 0 }, run.command), make("p", {}, facts.join(", ")));
  });
}

const sections = [showHead, showHealth, showCurves, showAnswers, showRollouts, showCommand];
sections.forEach((show) => show());
