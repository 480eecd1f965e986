// Bytes and operations of each kernel in a step, and what it takes of its device.

const COLUMNS = [
  { key: "op", text: "what it does" },
  { key: "name", text: "kernel" },
  { key: "launches", text: "launches", number: count },
  { key: "bytes", text: "moved", number: bytes, bar: "moved" },
  { key: "operations", text: "operations", number: operations, bar: "work" },
  { key: "intensity", text: "operations per byte", number: (n) => n.toPrecision(3) },
  { key: "bound_us", text: "bound, µs", number: (n) => n.toFixed(2), bar: "bound" },
  { key: "bound", text: "bound by" },
  { key: "registers", text: "registers", number: count },
  { key: "spills", text: "spills, bytes", number: count },
  { key: "shared_bytes", text: "shared", number: bytes },
  { key: "occupancy", text: "occupancy", number: (n) => `${Math.round(100 * n)}%` },
  { key: "matrix", text: "matrix instructions" },
];

function operations(n) {
  const units = ["", " k", " M", " G", " T"];
  let power = 0;
  while (n >= 1000 && power < units.length - 1) {
    n /= 1000;
    power += 1;
  }
  return `${power ? n.toPrecision(3) : n}${units[power]}`;
}

function kernelsView(params) {
  const targets = Object.keys(DATA.kernels.targets);
  const target = targets.includes(params.get("target")) ? params.get("target") : targets[0];
  const { rows, why } = DATA.kernels.targets[target];
  const steps = [...new Set(rows.map((row) => row.step || "not in these steps"))];
  const step = steps.includes(params.get("step")) ? params.get("step") : steps[0];
  const where = (changed) => go("kernels", { target, step, sort: params.get("sort"), ...changed });
  const toolbar = el(
    "div",
    { class: "toolbar" },
    select(
      "target",
      targets.map((name) => [name, name]),
      target,
      (name) => go("kernels", { target: name }),
    ),
    steps.length
      ? select(
          "step",
          steps.map((name) => [name, stepText(name)]),
          step,
          (name) => where({ step: name }),
        )
      : null,
  );
  if (why) return el("div", {}, toolbar, el("p", { class: "card" }, why));
  const mine = rows.filter((row) => (row.step || "not in these steps") === step).map(prepared);
  return el(
    "div",
    { class: "kernels" },
    toolbar,
    kernelFacts(mine),
    kernelTable(mine, params.get("sort") || "", (sort) => where({ sort })),
    el(
      "p",
      { class: "note" },
      "Counted, not measured: what each kernel must read, write and compute in the step, however it does it. ",
      "Bytes are of weights, keys and values, and activations; ",
      "operations are the multiplications and additions of products that count (keys that a mask hides do ",
      "not). A bound is the least time that the device's figures allow. ",
      "octavo profile measures.",
    ),
  );
}

function stepText(name) {
  const shape = DATA.kernels.steps[name];
  return shape
    ? `${name}: ${plural(shape.requests, "request")}, ${plural(shape.tokens, "new token")} each after ${count(shape.context)}`
    : name;
}

function prepared(row) {
  const matrix =
    row.matrix &&
    (Object.entries(row.matrix)
      .map(([kind, n]) => `${n} ${kind}`)
      .join(" ") ||
      "none");
  return { ...row, matrix, intensity: row.bytes && row.operations ? row.operations / row.bytes : undefined };
}

function kernelFacts(rows) {
  const sum = (key) => rows.reduce((total, row) => total + (row[key] || 0), 0);
  const fact = (value, text) =>
    el("div", { class: "fact" }, el("strong", {}, value), el("span", { class: "note" }, text));
  return el(
    "div",
    {
      class: "facts",
      "data-bytes": sum("bytes"),
      "data-operations": sum("operations"),
      "data-launches": sum("launches"),
    },
    fact(bytes(sum("bytes")), "moved in the step"),
    fact(`${operations(sum("operations"))}`, "operations"),
    fact(count(sum("launches")), "launches"),
    sum("bound_us") ? fact(`${sum("bound_us").toFixed(1)} µs`, "at least, on this device") : null,
  );
}

/** sort: a column's key, with - before it for ascending; "": as they run. */
function kernelTable(rows, sort, choose) {
  const columns = COLUMNS.filter(
    ({ key }) =>
      rows.some((row) => row[key] !== undefined) &&
      (key !== "name" || rows.some((row) => row.name !== row.op)),
  );
  const key = sort.replace(/^-/, ""),
    up = sort.startsWith("-");
  const sorted = columns.some((column) => column.key === key)
    ? [...rows].sort((a, b) => (up ? 1 : -1) * compared(a[key], b[key]))
    : rows;
  const most = Object.fromEntries(
    columns.map((column) => [
      column.key,
      Math.max(0, ...rows.map((row) => (column.bar ? row[column.key] || 0 : 0))),
    ]),
  );
  const head = (column) =>
    el(
      "th",
      {
        class: column.number && !column.bar ? "right" : null,
        "aria-sort": column.key === key ? (up ? "ascending" : "descending") : "none",
      },
      el(
        "button",
        { class: "sort", onclick: () => choose(column.key === key && !up ? `-${key}` : column.key) },
        column.text,
        el("span", { class: "arrow" }, column.key === key ? (up ? " ▴" : " ▾") : ""),
      ),
    );
  const cell = (row, column) => {
    const value = row[column.key];
    if (value === undefined) return el("td", {});
    const text = column.number ? column.number(value) : String(value);
    return el(
      "td",
      { class: column.bar ? "wide" : column.number ? "right mono" : column.key === "op" ? "" : "mono" },
      column.bar ? bar(most[column.key] ? value / most[column.key] : 0, text, column.bar) : text,
    );
  };
  return el(
    "div",
    { class: "card scroll" },
    el(
      "table",
      { class: "figures" },
      el("thead", {}, el("tr", {}, columns.map(head))),
      el(
        "tbody",
        {},
        sorted.map((row) =>
          el(
            "tr",
            {},
            columns.map((column) => cell(row, column)),
          ),
        ),
      ),
    ),
  );
}

function compared(a, b) {
  if (a === undefined || b === undefined) return (a === undefined ? -1 : 0) + (b === undefined ? 1 : 0);
  return a < b ? -1 : a > b ? 1 : 0;
}
