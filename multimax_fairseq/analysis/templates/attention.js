"use strict";

// The sides of the sentence pair that are queries (rows) and keys (columns).
const SIDES = {
  encoder: ["source", "source"],
  decoder: ["target", "target"],
  cross: ["target", "source"],
};
const NAMES = {
  encoder: "encoder self-attention",
  decoder: "decoder self-attention",
  cross: "cross-attention",
};

// The weights of a head, of the mean over the heads ("mean"), or of the roll-out ("rollout").
function weights(example, kind, layer, head) {
  if (head === "rollout") return example.rollout[kind][layer];
  const heads = example.attention[kind][layer];
  if (head !== "mean") return heads[head];
  return heads[0].map((row, q) =>
    row.map((_, k) => heads.reduce((sum, one) => sum + one[q][k], 0) / heads.length));
}

// Merges subwords: sums the weights of a key's subwords, averages those of a query's.
function joined(matrix, queries, keys) {
  const rows = queries.map((word) => {
    const own = matrix.slice(word.start, word.end);
    return own[0].map((_, k) => own.reduce((sum, row) => sum + row[k], 0) / own.length);
  });
  return rows.map((row) => keys.map((word) =>
    row.slice(word.start, word.end).reduce((sum, weight) => sum + weight, 0)));
}

// {queries, keys, matrix}: labels of rows and columns, and the weights.
function view(example, kind, layer, head, join) {
  const [asking, asked] = SIDES[kind].map((side) => example[side]);
  const matrix = weights(example, kind, layer, head);
  if (!join) return { queries: asking.tokens, keys: asked.tokens, matrix };
  return {
    queries: asking.words.map((word) => word.word),
    keys: asked.words.map((word) => word.word),
    matrix: joined(matrix, asking.words, asked.words),
  };
}

function headsOf(example, kind, layer) {
  const heads = example.attention[kind][layer].map((_, head) => [String(head), String(head + 1)]);
  const more = [["mean", "mean over heads"]];
  if (example.rollout && example.rollout[kind]) more.push(["rollout", "roll-out to this layer"]);
  return more.concat(heads);
}

// The densities of a query, one per head; a word has those of all its subwords. Empty for discrete
// attention.
function densities(example, kind, layer, head, join, query) {
  const found = example.densities && example.densities[kind];
  if (!found || head === "rollout") return [];
  const { kind: density, mean, variance, support } = found[layer];
  const { start, end } =
    join ? example[SIDES[kind][0]].words[query] : { start: query, end: query + 1 };
  const parts = [];
  for (const h of head === "mean" ? mean.keys() : [Number(head)]) {
    for (let q = start; q < end; q++) {
      parts.push({ density, mean: mean[h][q], variance: variance[h][q], support: support[h][q] });
    }
  }
  return parts;
}

// The standard deviation of a Gaussian, or half the support of a truncated parabola.
function widthOf({ density, variance }) {
  return density === "sparsemax" ? Math.cbrt(1.5 * variance) : Math.sqrt(variance);
}

function densityAt(part, time) {
  const width = widthOf(part);
  const square = ((time - part.mean) / width) ** 2;
  if (part.density === "sparsemax") return Math.max(0, 0.75 * (1 - square)) / width;
  return Math.exp(-square / 2) / (width * Math.sqrt(2 * Math.PI));
}

// {points, inside}: the mean of densities as [x, density], where x is in columns of the matrix, and
// the columns that have a token in a support.
function overColumns(parts, length, columns) {
  // Token l of `length` has the position l / length, in the middle of its part of a column.
  const timeAt = (x) => {
    const column = Math.min(Math.floor(x), columns.length - 1);
    const { start, end } = columns[column];
    return (start + (x - column) * (end - start) + 0.5) / length;
  };
  const columnAt = (time) => {
    const token = time * length - 0.5;
    const column = columns.findIndex(({ end }) => token < end);
    if (token < 0 || column < 0) return [];
    const { start, end } = columns[column];
    return [column + (token - start) / (end - start)];
  };
  const steps = 16;
  const times = Array.from({ length: columns.length * steps + 1 }, (_, step) => step / steps);
  for (const part of parts) {  // a narrow density may lie between the steps
    for (let far = -3; far <= 3; far += 0.25) {
      times.push(...columnAt(part.mean + far * widthOf(part)));
    }
  }
  const points = times.sort((one, other) => one - other).map((x) =>
    [x, parts.reduce((sum, part) => sum + densityAt(part, timeAt(x)), 0) / parts.length]);
  const inside = columns.map(({ start, end }) =>
    parts.some(({ support }) => support[0] < end && start < support[1]));
  return { points, inside };
}

function start(document) {
  const examples = JSON.parse(document.getElementById("examples").textContent);
  const choices = {};
  for (const name of ["sentence", "kind", "layer", "head", "join", "keys", "message", "matrix"]) {
    choices[name] = document.getElementById(name);
  }
  let chosen = [0, 0];
  let shown = null;
  let curve = null;

  function options(select, pairs) {
    const before = select.value;
    select.replaceChildren(...pairs.map(([value, text]) => {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = text;
      return option;
    }));
    if (pairs.some(([value]) => value === before)) select.value = before;
  }

  function colour(weight) {
    return `rgba(var(--weight), ${Math.min(1, Math.sqrt(weight)).toFixed(3)})`;
  }

  // Selects a cell: shows its row's weights over the words, and its weight as text.
  function choose(query, key, focus) {
    chosen = [query, key];
    const rows = [...choices.matrix.tBodies[0].rows];
    rows.forEach((row, q) => {
      row.classList.toggle("chosen", q === query);
      [...row.cells].slice(1).forEach((cell, k) => {
        cell.tabIndex = q === query && k === key ? 0 : -1;
      });
    });
    if (focus) rows[query].cells[key + 1].focus();
    choices.keys.replaceChildren(...shown.keys.map((word, k) => {
      const span = document.createElement("span");
      span.textContent = word;
      span.style.borderBottomColor = colour(shown.matrix[query][k]);
      return span;
    }));
    const weight = shown.matrix[query][key].toFixed(4);
    choices.message.textContent =
      `“${shown.queries[query]}” gives “${shown.keys[key]}” the weight ${weight}.`;
    if (curve) chooseDensity(query);
  }

  // Draws the density of a query and marks the words in the support of a parabola.
  function chooseDensity(query) {
    const [example, kind, layer, head, join] = shown.asked;
    const parts = densities(example, kind, layer, head, join, query);
    const found = example.densities[kind][layer];
    const { words, tokens } = example[SIDES[kind][1]];
    const columns = join ? words : tokens.map((_, k) => ({ start: k, end: k + 1 }));
    const { points, inside } = overColumns(parts, 1 / found.positions[0], columns);
    // If only a part of the sentence is shown, the density may lie outside of it.
    const top = points.reduce((most, [, density]) => Math.max(most, density), 0) || 1;
    const line = points.map(([x, density]) => `L${x.toFixed(3)} ${(1 - density / top).toFixed(4)}`);
    curve.firstElementChild.setAttribute("d", `M0 1${line.join("")}L${columns.length} 1Z`);
    const isMarked = (k) => found.kind === "sparsemax" && inside[k];
    const heads = [...choices.matrix.tHead.rows[0].cells].slice(1);
    for (const row of [heads, [...choices.keys.children]]) {
      row.forEach((word, k) => word.classList.toggle("inside", isMarked(k)));
    }
    const mean = parts.reduce((sum, part) => sum + part.mean, 0) / parts.length;
    const marked = shown.keys.filter((_, k) => isMarked(k)).join(" ") || "no word";
    const support = found.kind === "sparsemax" ? `, and in its support: ${marked}` : "";
    choices.message.textContent +=
      ` Its density over the sentence has its mean at ${mean.toFixed(2)}${support}.`;
  }


  function cell(name, text) {
    const found = document.createElement(name);
    if (text !== undefined) found.textContent = text;
    return found;
  }

  function draw() {
    const example = examples[Number(choices.sentence.value)];
    const kinds = Object.keys(NAMES).filter((name) => name in example.attention);
    options(choices.kind, kinds.map((name) => [name, NAMES[name]]));
    const kind = choices.kind.value;
    options(choices.layer, example.attention[kind].map((_, n) => [String(n), String(n + 1)]));
    const layer = Number(choices.layer.value);
    options(choices.head, headsOf(example, kind, layer));
    const asked = [example, kind, layer, choices.head.value, choices.join.checked];
    shown = { ...view(...asked), asked };
    const head = document.createElement("thead");
    const top = head.insertRow();
    top.append(cell("td"));
    shown.keys.forEach((word) => {
      const th = cell("th");
      th.scope = "col";
      th.append(cell("span", word));
      top.append(th);
    });
    curve = null;
    if (densities(...asked, 0).length) {
      const below = document.getElementById("density").content.cloneNode(true);
      curve = below.querySelector("svg");
      curve.setAttribute("viewBox", `0 0 ${shown.keys.length} 1`);
      curve.parentNode.colSpan = shown.keys.length;
      head.append(below);
    }
    const body = document.createElement("tbody");
    shown.queries.forEach((word, q) => {
      const row = body.insertRow();
      const th = cell("th", word);
      th.scope = "row";
      row.append(th);
      shown.keys.forEach((key, k) => {
        const td = cell("td");
        const weight = shown.matrix[q][k];
        td.style.background = colour(weight);
        td.title = `${word} → ${key}: ${weight.toFixed(4)}`;
        td.setAttribute("aria-label", td.title);
        td.addEventListener("click", () => choose(q, k, true));
        row.append(td);
      });
    });
    choices.matrix.replaceChildren(head, body);
    choices.matrix.setAttribute("aria-label", `${NAMES[kind]}, layer ${layer + 1}`);
    choose(
      Math.min(chosen[0], shown.queries.length - 1),
      Math.min(chosen[1], shown.keys.length - 1),
      false,
    );
  }

  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  choices.matrix.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const inside = (value, count) => Math.max(0, Math.min(count - 1, value));
    choose(
      inside(chosen[0] + step[0], shown.queries.length),
      inside(chosen[1] + step[1], shown.keys.length),
      true,
    );
  });
  options(choices.sentence, examples.map((example, n) => {
    const side = example.source.words.length ? example.source : example.target;
    return [String(n), `${n + 1}: ${side.words.map((word) => word.word).join(" ").slice(0, 60)}`];
  }));
  for (const name of ["sentence", "kind", "layer", "head", "join"]) {
    choices[name].addEventListener("change", draw);
  }
  draw();
}

if (typeof document !== "undefined") start(document);
