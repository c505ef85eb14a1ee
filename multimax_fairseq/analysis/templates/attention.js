"use strict";

// The sides of the sentence pair that ask (rows) and are asked (columns).
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

// The weights of a head; head "mean" is the mean over the heads, "rollout" the roll-out.
function weights(example, place, layer, head) {
  if (head === "rollout") return example.rollout[place][layer];
  const heads = example.attention[place][layer];
  if (head !== "mean") return heads[head];
  return heads[0].map((row, q) =>
    row.map((_, k) => heads.reduce((sum, one) => sum + one[q][k], 0) / heads.length));
}

// Of subwords to words: what a word is given adds up, what its subwords give is averaged.
function joined(matrix, queries, keys) {
  const rows = queries.map((word) => {
    const own = matrix.slice(word.start, word.end);
    return own[0].map((_, k) => own.reduce((sum, row) => sum + row[k], 0) / own.length);
  });
  return rows.map((row) => keys.map((word) =>
    row.slice(word.start, word.end).reduce((sum, weight) => sum + weight, 0)));
}

// {queries, keys, matrix}: names of rows and columns, and the weights.
function view(example, place, layer, head, join) {
  const [asking, asked] = SIDES[place].map((side) => example[side]);
  const matrix = weights(example, place, layer, head);
  if (!join) return { queries: asking.tokens, keys: asked.tokens, matrix };
  return {
    queries: asking.words.map((word) => word.word),
    keys: asked.words.map((word) => word.word),
    matrix: joined(matrix, asking.words, asked.words),
  };
}

function headsOf(example, place, layer) {
  const heads = example.attention[place][layer].map((_, head) => [String(head), String(head + 1)]);
  const more = [["mean", "mean over heads"]];
  if (example.rollout && example.rollout[place]) more.push(["rollout", "roll-out to this layer"]);
  return more.concat(heads);
}

function start(document) {
  const examples = JSON.parse(document.getElementById("examples").textContent);
  const choices = {};
  for (const name of ["sentence", "place", "layer", "head", "join", "keys", "told", "matrix"]) {
    choices[name] = document.getElementById(name);
  }
  let chosen = [0, 0];
  let shown = null;

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

  // What a click or an arrow key does: the cell, its row's weights over the words, and in words.
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
    choices.told.textContent =
      `“${shown.queries[query]}” gives “${shown.keys[key]}” the weight ${weight}.`;
  }

  function cell(name, text) {
    const found = document.createElement(name);
    if (text !== undefined) found.textContent = text;
    return found;
  }

  function draw() {
    const example = examples[Number(choices.sentence.value)];
    const places = Object.keys(NAMES).filter((name) => name in example.attention);
    options(choices.place, places.map((name) => [name, NAMES[name]]));
    const place = choices.place.value;
    options(choices.layer, example.attention[place].map((_, n) => [String(n), String(n + 1)]));
    const layer = Number(choices.layer.value);
    options(choices.head, headsOf(example, place, layer));
    shown = view(example, place, layer, choices.head.value, choices.join.checked);
    const head = document.createElement("thead");
    const top = head.insertRow();
    top.append(cell("td"));
    shown.keys.forEach((word) => {
      const th = cell("th");
      th.scope = "col";
      th.append(cell("span", word));
      top.append(th);
    });
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
    choices.matrix.setAttribute("aria-label", `${NAMES[place]}, layer ${layer + 1}`);
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
  for (const name of ["sentence", "place", "layer", "head", "join"]) {
    choices[name].addEventListener("change", draw);
  }
  draw();
}

if (typeof document !== "undefined") start(document);
