// Beside the graph: all of the op that is chosen, else what goes into the graph and comes out.

function drawDetails(state, place, draw, groups) {
  const op = state.op;
  place.classList.toggle("idle", !op);
  if (!op) {
    place.replaceChildren(
      el(
        "p",
        { class: "note" },
        "Point at an op to see what it reads and what reads it; choose one for all of it.",
      ),
      inputsOf(state),
    );
    return;
  }
  const jump = (each) =>
    el(
      "button",
      { class: "jump", onclick: () => state.choose(each) },
      el("span", { class: `kind ${family(each.kind)}` }, each.kind),
      el("span", { class: "mono" }, each.outs.join(", ")),
    );
  const external = op.args
    .filter((arg) => !state.graph.makers.has(arg))
    .map((arg) => argument(state, op, arg));
  const readers = consumers(state.graph, op);
  place.replaceChildren(
    el(
      "h3",
      {},
      el("span", { class: `kind ${family(op.kind)}` }, op.kind),
      ` op ${op.n}`,
      el("button", { class: "close", "aria-label": "close", onclick: () => state.choose(null) }, "×"),
    ),
    definitions([
      [
        "makes",
        el(
          "div",
          {},
          op.outs.map((out, i) => el("div", { class: "mono" }, `${out}: ${op.types[i]}`)),
        ),
      ],
      ["module", el("span", { class: "mono" }, op.fullLoc || "none")],
      [
        "attributes",
        op.attrs.length
          ? el(
              "div",
              {},
              op.attrs.map((text) => el("div", { class: "mono" }, text)),
            )
          : null,
      ],
      ["reads", el("div", {}, producers(state.graph, op).map(jump), external)],
      [
        "read by",
        el(
          "div",
          {},
          readers.slice(0, 12).map(jump),
          readers.length > 12 ? el("div", { class: "note" }, `and ${readers.length - 12} more`) : null,
          op.outs
            .filter((out) => state.graph.outputs.includes(out))
            .map(() => el("div", { class: "note" }, "the caller: it is a result of the graph")),
          readers.length ? null : el("div", { class: "note" }, "no other op"),
        ),
      ],
    ]),
  );
}

function argument(state, op, arg) {
  const type = arg.startsWith("@")
    ? op.weights[op.args.filter((a) => a.startsWith("@")).indexOf(arg)]
    : state.graph.types.get(arg);
  const what = arg.startsWith("@")
    ? "weight"
    : arg.startsWith("%")
      ? "input"
      : arg === "_"
        ? "absent"
        : "literal";
  return el(
    "div",
    { class: "mono" },
    `${arg}${type ? `: ${type}` : ""} `,
    el("span", { class: "note" }, what),
  );
}

function inputsOf(state) {
  return el(
    "div",
    {},
    el("h3", {}, "Inputs of the graph"),
    state.graph.inputs.map((input) => el("div", { class: "mono input" }, `${input.name}: ${input.type}`)),
    el("h3", {}, "Its results"),
    state.graph.outputs.map((name) =>
      el("div", { class: "mono input" }, `${name}: ${state.graph.types.get(name)}`),
    ),
  );
}
