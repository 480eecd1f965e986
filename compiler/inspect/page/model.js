// The data: graphs, put back together from templates and names (compiler/inspect/pool.py wrote them).

const DATA = JSON.parse(document.getElementById("data").textContent);
const TEXTS = DATA.texts;
const STATUSES = ["same", "changed", "removed", "added"];
const PARTS = ["name", "operands", "attributes", "type", "loc"];
const BEFORE = "before",
  AFTER = "after";
const expanded = new Map();

const stageNamed = (name) => DATA.stages.find((stage) => stage.name === name);
const lastStage = () => DATA.stages[DATA.stages.length - 1];

/** A section's ops. Each: n (its place in the graph), kind, outs, args, attrs, types, weights, loc, path. */
function sectionOps(section) {
  const [pathText, template, namesNumber, runs] = section;
  const names = DATA.names[namesNumber].map((text) => TEXTS[text]);
  const order = [];
  for (let i = 0; i < runs.length; i += 2) for (let k = 0; k < runs[i + 1]; k += 1) order.push(runs[i] + k);
  const path = TEXTS[pathText];
  return DATA.templates[template][1].map((row, index) => {
    const [kind, outs, args, attrs, numbered, types, weights, loc] = row;
    return {
      n: order[index],
      kind: TEXTS[kind],
      outs: outs.map((slot) => names[slot]),
      args: args.map((arg) => (arg >= 0 ? names[arg] : TEXTS[-1 - arg])),
      attrs: [...attrs.map((text) => TEXTS[text]), ...numbered.map((slot) => names[slot])],
      types: types.map((text) => TEXTS[text]),
      weights: weights.map((text) => TEXTS[text]),
      loc: TEXTS[loc],
      fullLoc: fullLoc(path, TEXTS[loc]),
      path,
    };
  });
}

function fullLoc(path, loc) {
  if (path === BEFORE || path === AFTER) return loc;
  return loc ? `${path}.${loc}` : path;
}

/** A graph by number: sections with their ops, all ops in order, and who makes and who reads each value. */
function graphOf(number) {
  if (expanded.has(number)) return expanded.get(number);
  const graph = DATA.graphs[number];
  const sections = graph.sections.map((section) => ({
    path: TEXTS[section[0]],
    template: section[1],
    ops: sectionOps(section),
  }));
  const ops = sections.flatMap((section) => section.ops).sort((a, b) => a.n - b.n);
  const makers = new Map(),
    readers = new Map(),
    types = new Map();
  for (const op of ops)
    op.outs.forEach((out, i) => {
      makers.set(out, op);
      types.set(out, op.types[i]);
    });
  for (const op of ops) {
    for (const arg of new Set(op.args)) {
      if (!arg.startsWith("%")) continue;
      if (!readers.has(arg)) readers.set(arg, []);
      readers.get(arg).push(op);
    }
  }
  const inputs = graph.inputs.map(([name, type]) => ({ name: TEXTS[name], type: TEXTS[type] }));
  for (const input of inputs) types.set(input.name, input.type);
  const found = {
    sections,
    ops,
    makers,
    readers,
    types,
    inputs,
    outputs: graph.outputs.map((t) => TEXTS[t]),
  };
  expanded.set(number, found);
  return found;
}

const producers = (graph, op) => [...new Set(op.args.map((arg) => graph.makers.get(arg)).filter(Boolean))];
const consumers = (graph, op) => [...new Set(op.outs.flatMap((out) => graph.readers.get(out) || []))];

/** Layers that do the same together, by template. */
function folded(sections) {
  const groups = new Map();
  for (const section of sections) {
    if (!groups.has(section.template)) groups.set(section.template, []);
    groups.get(section.template).push(section);
  }
  return [...groups.values()];
}

/** Paths of layers in words: model.layers.0, 2-4. */
function span(paths) {
  const parents = new Map();
  for (const path of paths) {
    const at = path.lastIndexOf(".");
    const number = path.slice(at + 1);
    const layer = /^[0-9]+$/.test(number);
    const parent = layer ? path.slice(0, Math.max(at, 0)) : path;
    if (!parents.has(parent)) parents.set(parent, []);
    if (layer) parents.get(parent).push(Number(number));
  }
  return [...parents].map(([parent, numbers]) => ranges(parent, numbers)).join("; ");
}

function ranges(parent, numbers) {
  if (numbers.length === 0) {
    return { [BEFORE]: "before the layers", [AFTER]: "after the layers" }[parent] || parent;
  }
  const runs = [];
  for (const number of numbers) {
    const last = runs[runs.length - 1];
    if (last && number === last[last.length - 1] + 1) last.push(number);
    else runs.push([number]);
  }
  const shown = runs
    .map((run) => (run.length > 2 ? `${run[0]}–${run[run.length - 1]}` : run.join(", ")))
    .join(", ");
  return parent ? `${parent}.${shown}` : shown;
}

/** Operands with the types of weights beside them. */
function operands(op) {
  let at = 0;
  return op.args.map((arg) => (arg.startsWith("@") ? `${arg}: ${op.weights[at++]}` : arg));
}

function opText(op) {
  const args = operands(op).join(", ");
  const attrs = op.attrs.length ? ` {${op.attrs.join(", ")}}` : "";
  return `${op.outs.join(", ")} = ${op.kind}${args ? " " + args : ""}${attrs} : ${op.types.join(", ")}`;
}

const FAMILIES = {
  product: ["linear", "matmul", "qlinear", "conv1d", "embed"],
  attention: ["attention", "paged_attention", "kv_write", "softmax", "rope"],
  norm: ["rms_norm", "layer_norm", "mean", "sum", "max", "cumsum"],
  shape: [
    "reshape",
    "transpose",
    "expand",
    "slice",
    "concat",
    "split",
    "take",
    "take_rows",
    "cast",
    "iota",
    "full",
    "dim",
  ],
};
const families = new Map(
  Object.entries(FAMILIES).flatMap(([name, kinds]) => kinds.map((kind) => [kind, name])),
);
const family = (kind) => families.get(kind) || "point";

/** How often each kind occurs, the most frequent first. */
function kindCounts(ops) {
  const found = new Map();
  for (const op of ops) found.set(op.kind, (found.get(op.kind) || 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
}

/** The difference of two graphs: per section the ops of both and what became of them. */
function diffOf(before, after) {
  const turned = before > after;
  const key = turned ? `${after},${before}` : `${before},${after}`;
  const old = graphOf(before),
    now = graphOf(after);
  if (before === after) {
    return now.sections.map((s) => ({ path: s.path, old: s, now: s, key: "same", changes: allSame(s) }));
  }
  return DATA.diffs[key].map(([first, second, number, alike]) => {
    const a = old.sections[turned ? second : first],
      b = now.sections[turned ? first : second];
    const section = a || b;
    const same = number < 0;
    const changes = same ? allSame(section) : changesOf(DATA.changes[number], turned);
    return { path: section.path, old: a, now: b, key: same ? "same" : String(alike), changes };
  });
}

const allSame = (section) => section.ops.map((_, n) => ({ status: "same", before: n, after: n, what: [] }));

function changesOf(flat, turned) {
  const found = [];
  for (let i = 0; i < flat.length; i += 4) {
    const [status, first, second, bits] = flat.slice(i, i + 4);
    const what = PARTS.filter((_, bit) => bits & (1 << bit));
    const turnedStatus = { removed: "added", added: "removed" }[STATUSES[status]] || STATUSES[status];
    found.push(
      turned
        ? { status: turnedStatus, before: second, after: first, what }
        : { status: STATUSES[status], before: first, after: second, what },
    );
  }
  return turned ? removedFirst(found) : found;
}

/** What was removed before what came in its place. */
function removedFirst(changes) {
  const found = [];
  let come = [];
  for (const change of changes) {
    if (change.status === "added") {
      come.push(change);
      continue;
    }
    if (change.status !== "removed") {
      found.push(...come);
      come = [];
    }
    found.push(change);
  }
  return [...found, ...come];
}
