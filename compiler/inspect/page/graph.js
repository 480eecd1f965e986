// The graph of one stage: layers that do the same once, their ops in order with the values between them.

function graphView(params) {
  const stage = stageNamed(params.get("stage")) || lastStage();
  const graph = graphOf(stage.graph);
  const state = {
    stage,
    graph,
    open: new Set(),
    layer: new Map(),
    query: params.get("find") || "",
    op: null,
  };
  state.op = graph.makers.get(params.get("op")) || null;
  const list = el("div", { class: "groups" });
  const details = el("aside", { class: "details", "aria-live": "polite" });
  const groups = folded(graph.sections);
  const opened = state.op ? groups.find((g) => g.some((s) => s.path === state.op.path)) : biggest(groups);
  if (opened) {
    state.open.add(opened);
    state.layer.set(opened, sectionOf(opened, state.op) || opened[0]);
  }
  const draw = () => {
    list.replaceChildren(...groups.map((g) => groupCard(state, g, draw)));
    drawDetails(state, details, draw, groups);
    mark(state, list, state.op);
  };
  state.choose = (op) => {
    state.op = op;
    replaceParams("graph", { stage: stage.name, op: op && op.outs[0], find: state.query });
    const group = op && groups.find((g) => g.some((s) => s.path === op.path));
    if (group) {
      state.open.add(group);
      state.layer.set(group, sectionOf(group, op));
    }
    draw();
    const row =
      op && [...list.querySelectorAll(".op[tabindex]")].find((each) => each.dataset.value === op.outs[0]);
    if (row) {
      row.focus({ preventScroll: true });
      row.scrollIntoView({ block: "nearest" });
    }
  };
  state.hover = (op) => mark(state, list, op || state.op);
  const search = el("input", {
    type: "search",
    placeholder: "Find a kind, name, weight, shape or module",
    value: state.query,
    "aria-label": "Find ops",
    oninput: () => {
      state.query = search.value;
      replaceParams("graph", { stage: stage.name, find: state.query });
      draw();
    },
  });
  const found = el("span", { class: "note found" });
  state.found = found;
  draw();
  return el(
    "div",
    { class: "graph" },
    stageStrip(stage.name, (name) => go("graph", { stage: name, find: state.query })),
    el(
      "div",
      { class: "toolbar" },
      el("h2", {}, stage.name),
      stageSteps(stage),
      el("span", { class: "note total", "data-ops": graph.ops.length }, plural(graph.ops.length, "op")),
      search,
      found,
      legend(),
    ),
    el("div", { class: "split" }, list, details),
  );
}

const biggest = (groups) =>
  groups.reduce((best, group) => (!best || weight(group) > weight(best) ? group : best), null);
const weight = (group) => group.length * group[0].ops.length;
const sectionOf = (group, op) => op && group.find((section) => section.path === op.path);

function stageSteps(stage) {
  const at = DATA.stages.indexOf(stage);
  const step = (to, text, label) =>
    el(
      "button",
      {
        disabled: !DATA.stages[to],
        "aria-label": label,
        title: label,
        onclick: () => go("graph", { stage: DATA.stages[to].name }),
      },
      text,
    );
  const changes =
    at > 0 &&
    el(
      "button",
      { onclick: () => go("diff", { a: DATA.stages[at - 1].name, b: stage.name }) },
      "what it changed",
    );
  return el(
    "span",
    { class: "steps" },
    step(at - 1, "←", "the stage before"),
    step(at + 1, "→", "the next stage"),
    changes || null,
  );
}

function legend() {
  return el(
    "span",
    { class: "legend" },
    ["product", "attention", "norm", "point", "shape"].map((name) =>
      el(
        "span",
        { class: `kind ${name}` },
        {
          product: "products",
          attention: "attention",
          norm: "norms, sums",
          point: "pointwise",
          shape: "shapes",
        }[name],
      ),
    ),
  );
}

function matches(op, query) {
  return query
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .every((word) => `${opText(op)} ${op.fullLoc}`.toLowerCase().includes(word));
}

function groupCard(state, group, draw) {
  const hits = state.query
    ? group.filter((section) => section.ops.some((op) => matches(op, state.query)))
    : group;
  if (state.query) countFound(state);
  else state.found.textContent = "";
  if (!hits.length) return null;
  const shown = hits.includes(state.layer.get(group)) ? state.layer.get(group) : hits[0];
  const open = state.open.has(group) || Boolean(state.query);
  const toggle = () => {
    if (state.open.has(group)) state.open.delete(group);
    else state.open.add(group);
    draw();
  };
  const title = span(group.map((section) => section.path));
  const equal =
    group.length > 1
      ? `${group.length} equal layers, ${plural(shown.ops.length, "op")} each`
      : plural(shown.ops.length, "op");
  const picker =
    open &&
    group.length > 1 &&
    select(
      "showing",
      hits.map((s) => [s.path, s.path]),
      shown.path,
      (path) => {
        state.layer.set(
          group,
          group.find((s) => s.path === path),
        );
        draw();
      },
    );
  const kinds = kindCounts(shown.ops)
    .slice(0, 7)
    .map(([kind, n]) => el("span", { class: `kind ${family(kind)}` }, n > 1 ? `${kind} ×${n}` : kind));
  return el(
    "section",
    { class: `group${open ? " open" : ""}`, "data-paths": group.map((s) => s.path).join(" ") },
    el(
      "div",
      { class: "group-head" },
      el(
        "button",
        { class: "toggle", "aria-expanded": String(open), onclick: toggle },
        el("span", { class: "caret" }, open ? "▾" : "▸"),
        el("strong", {}, title),
      ),
      el("span", { class: "note" }, equal),
      picker || el("span", { class: "kinds" }, open ? null : kinds),
    ),
    open ? opTable(state, shown) : null,
  );
}

function countFound(state) {
  const found = state.graph.ops.filter((op) => matches(op, state.query)).length;
  state.found.textContent = found ? `${plural(found, "op")} found` : "nothing found";
  state.found.dataset.found = found;
}

function opTable(state, section) {
  const ops = state.query ? section.ops.filter((op) => matches(op, state.query)) : section.ops;
  const { paths, lanes } = arcs(ops);
  const width = lanes * LANE + 10;
  const drawing = svg(
    "svg",
    { class: "arcs", width, height: (ops.length + 1) * ROW, "aria-hidden": "true" },
    svg(
      "g",
      {},
      paths.map((p) =>
        svg("path", { d: arc(p, width), class: "arc", "data-value": p.value, "data-to": ops[p.to].outs[0] }),
      ),
    ),
    ops.map((op, i) =>
      svg("circle", { cx: width - 4, cy: middle(i), r: 3, class: `dot ${family(op.kind)}` }),
    ),
  );
  const rows = ops.map((op, i) => opRow(state, op, i, ops));
  return el(
    "div",
    { class: "ops" },
    drawing,
    el("div", { class: "rows", role: "list", onmouseleave: () => state.hover(null) }, opHead(), rows),
  );
}

function opHead() {
  const titles = [
    ["number", "#"],
    ["", "op"],
    ["", "makes"],
    ["", "shape"],
    ["reads", "reads"],
    ["loc", "module"],
  ];
  return el(
    "div",
    { class: "op head", "aria-hidden": "true" },
    titles.map(([name, text]) => el("span", { class: name }, text)),
  );
}

function opRow(state, op, index, ops) {
  const loc = op.path === BEFORE || op.path === AFTER ? op.loc : op.loc || "·";
  return el(
    "div",
    {
      class: "op",
      role: "listitem",
      tabindex: "0",
      "data-value": op.outs[0],
      title: `${opText(op)}\n${op.fullLoc}`,
      onmouseenter: () => state.hover(op),
      onfocus: () => state.hover(op),
      onclick: () => state.choose(op),
      onkeydown: (event) => rowKey(event, state, op),
    },
    el("span", { class: "number" }, String(op.n)),
    el("span", { class: `kind ${family(op.kind)}` }, op.kind),
    el("span", { class: "result mono" }, op.outs.join("  ")),
    el("span", { class: "type mono" }, op.types.join(", ")),
    el("span", { class: "reads mono" }, op.args.map((arg) => shorter(arg, op.path)).join("  ")),
    el("span", { class: "loc mono" }, loc),
  );
}

/** A weight without its layer's path, which the group says. */
const shorter = (name, path) => (name.startsWith(`@${path}.`) ? `@…${name.slice(path.length + 1)}` : name);

function rowKey(event, state, op) {
  const row = event.currentTarget;
  if (event.key === "Enter" || event.key === " ") state.choose(op);
  else if (event.key === "ArrowDown" && row.nextElementSibling) row.nextElementSibling.focus();
  else if (event.key === "ArrowUp" && row.previousElementSibling.tabIndex === 0)
    row.previousElementSibling.focus();
  else return;
  event.preventDefault();
}
