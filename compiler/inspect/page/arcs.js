// The lines beside a table of ops, from those that make a value to those that read it, and which are marked.

const ROW = 26;
const LANE = 9;
const MAX_LANES = 14;

/** Above the rows, as high as one of them. */
const middle = (row) => (row + 1) * ROW + ROW / 2;

/** Lines from the op that makes a value to those that read it, in lanes in which no two of them meet. */
function arcs(ops) {
  const place = new Map(),
    last = new Map();
  ops.forEach((op, i) => op.outs.forEach((out) => place.set(out, i)));
  const found = [];
  ops.forEach((op, to) =>
    new Set(op.args).forEach((arg) => {
      if (place.has(arg)) {
        found.push({ value: arg, from: place.get(arg), to });
        last.set(arg, to);
      }
    }),
  );
  const lanes = [],
    laneOf = new Map();
  for (const { value, from } of found.sort((a, b) => a.from - b.from || b.to - a.to)) {
    if (laneOf.has(value)) continue;
    let lane = lanes.findIndex((until) => until <= from);
    if (lane < 0) lane = lanes.push(0) - 1;
    lanes[lane] = last.get(value);
    laneOf.set(value, lane);
  }
  for (const path of found) path.lane = Math.min(laneOf.get(path.value), MAX_LANES);
  return { paths: found, lanes: Math.min(Math.max(lanes.length, 1), MAX_LANES + 1) };
}

function arc({ from, to, lane }, width) {
  const x = width - 4,
    y1 = middle(from),
    y2 = middle(to),
    left = x - 8 - lane * LANE;
  const half = (y1 + y2) / 2;
  const down = `M${x} ${y1} C${left} ${y1} ${left} ${y1} ${left} ${Math.min(y1 + 10, half)}`;
  return `${down} V${Math.max(y2 - 10, half)} C${left} ${y2} ${left} ${y2} ${x} ${y2}`;
}

/** Marks an op, those whose results it reads, and those that read its own. */
function mark(state, list, op) {
  const makes = new Set(op ? producers(state.graph, op) : []),
    reads = new Set(op ? consumers(state.graph, op) : []);
  for (const row of list.querySelectorAll(".op[tabindex]")) {
    const each = state.graph.makers.get(row.dataset.value);
    row.classList.toggle("chosen", each === op);
    row.classList.toggle("producer", makes.has(each));
    row.classList.toggle("consumer", reads.has(each));
  }
  for (const path of list.querySelectorAll(".arc")) {
    const out = op && op.outs.includes(path.dataset.value);
    const into = op && op.args.includes(path.dataset.value) && path.dataset.to === op.outs[0];
    path.classList.toggle("to-consumer", Boolean(out));
    path.classList.toggle("from-producer", Boolean(into));
  }
  for (const group of list.querySelectorAll(".group:not(.open)")) {
    const paths = group.dataset.paths.split(" ");
    group.classList.toggle(
      "has-producer",
      [...makes].some((each) => paths.includes(each.path)),
    );
    group.classList.toggle(
      "has-consumer",
      [...reads].some((each) => paths.includes(each.path)),
    );
  }
}
