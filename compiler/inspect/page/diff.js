// What differs between two stages, layer by layer.

const SIGNS = { removed: "−", added: "+", changed: "~", same: " " };

function diffView(params) {
  const [a, b] = diffStages(params);
  const names = DATA.stages.map((stage) => [stage.name, stage.name]);
  const found = diffOf(a.graph, b.graph);
  const totals = tally(found.flatMap((section) => section.changes));
  const choose = (first, second) => go("diff", { a: first, b: second, all: params.get("all") });
  const all = params.get("all") === "1";
  const toggle = el("input", {
    type: "checkbox",
    checked: all,
    onchange: () => go("diff", { a: a.name, b: b.name, all: all ? null : "1" }),
  });
  return el(
    "div",
    { class: "diff" },
    el(
      "div",
      { class: "toolbar" },
      select("from", names, a.name, (name) => choose(name, b.name)),
      select("to", names, b.name, (name) => choose(a.name, name)),
      el("button", { onclick: () => choose(b.name, a.name), title: "the other way round" }, "⇄ swap"),
      diffSteps(a, b),
      el("label", { class: "field" }, toggle, el("span", {}, "ops that stay too")),
    ),
    el(
      "p",
      {
        class: "totals",
        "data-totals": Object.keys(SIGNS)
          .map((s) => totals[s])
          .join(),
      },
      ["removed", "added", "changed", "same"].map((s) =>
        el("span", { class: `tally ${s}` }, `${count(totals[s])} ${s}`),
      ),
    ),
    el(
      "div",
      { class: "split narrow" },
      el("div", { class: "groups" }, ...alike(found).map((group) => diffGroup(group, a, b, all))),
      el("aside", { class: "details" }, el("h3", {}, "Ops by kind"), kindTable(a, b)),
    ),
  );
}

function diffStages(params) {
  const b = stageNamed(params.get("b")) || lastStage();
  const before = DATA.stages.filter(
    (stage) => stage.graph !== b.graph && DATA.stages.indexOf(stage) < DATA.stages.indexOf(b),
  );
  return [stageNamed(params.get("a")) || before[before.length - 1] || DATA.stages[0], b];
}

/** To the pass before and the next, where two neighbours are compared. */
function diffSteps(a, b) {
  const [first, second] = [DATA.stages.indexOf(a), DATA.stages.indexOf(b)];
  const step = (by, text, label) =>
    el(
      "button",
      {
        disabled: !DATA.stages[first + by] || !DATA.stages[second + by],
        "aria-label": label,
        title: label,
        onclick: () => go("diff", { a: DATA.stages[first + by].name, b: DATA.stages[second + by].name }),
      },
      text,
    );
  return el(
    "span",
    { class: "steps" },
    step(-1, "←", "both one stage earlier"),
    step(1, "→", "both one stage later"),
  );
}

function tally(changes) {
  const found = { removed: 0, added: 0, changed: 0, same: 0 };
  for (const change of changes) found[change.status] += 1;
  return found;
}

function alike(sections) {
  const groups = new Map();
  for (const section of sections) {
    if (!groups.has(section.key)) groups.set(section.key, []);
    groups.get(section.key).push(section);
  }
  return [...groups.values()];
}

function diffGroup(group, a, b, all) {
  const first = group[0];
  const totals = tally(first.changes);
  const paths = group.map((section) => section.path);
  const told = Object.keys(SIGNS)
    .filter((s) => totals[s])
    .map((s) => el("span", { class: `tally ${s}` }, `${totals[s]} ${s}`));
  if (first.key === "same" && !all) {
    return el(
      "section",
      { class: "group quiet" },
      el(
        "div",
        { class: "group-head" },
        el("strong", {}, span(paths)),
        el("span", { class: "note" }, "nothing changes"),
      ),
    );
  }
  return el(
    "section",
    { class: "group open", "data-paths": paths.join(" ") },
    el(
      "div",
      { class: "group-head" },
      el("strong", {}, span([first.path])),
      group.length > 1 ? el("span", { class: "note" }, `the same in ${span(paths.slice(1))}`) : null,
      el("span", { class: "kinds" }, told),
    ),
    el("div", { class: "changes" }, changeRows(first, a, b, all)),
  );
}

function changeRows(section, a, b, all) {
  let loc = null;
  return section.changes
    .filter((change) => all || change.status !== "same")
    .flatMap((change) => {
      const old = change.before >= 0 ? section.old.ops[change.before] : null;
      const now = change.after >= 0 ? section.now.ops[change.after] : null;
      const op = now || old;
      const head =
        op.fullLoc === loc
          ? []
          : [el("div", { class: "change-loc mono" }, op.fullLoc || "outside of modules")];
      loc = op.fullLoc;
      const link = el(
        "a",
        { href: address("graph", { stage: now ? b.name : a.name, op: op.outs[0] }), class: "show" },
        "show",
      );
      return [
        ...head,
        el(
          "div",
          { class: `change ${change.status}` },
          el("span", { class: "sign" }, SIGNS[change.status]),
          el(
            "span",
            { class: "mono text" },
            opText(op),
            change.status === "changed" ? el("span", { class: "was" }, was(change.what, old, now)) : null,
          ),
          link,
        ),
      ];
    });
}

/** Of a changed op what differs. */
function was(what, old, now) {
  return (
    " " +
    what
      .map((part) => {
        if (part === "attributes") {
          const gone = old.attrs.filter((text) => !now.attrs.includes(text)),
            come = now.attrs.filter((text) => !old.attrs.includes(text));
          return gone.length ? `had ${gone.join(", ")}` : `has got ${come.join(", ")}`;
        }
        const before = {
          name: old.outs.join(", "),
          operands: operands(old).join(", "),
          type: old.types.join(", "),
          loc: old.loc || "none",
        };
        return `${part} was ${before[part]}`;
      })
      .join("; ")
  );
}

function kindTable(a, b) {
  const before = new Map(kindCounts(graphOf(a.graph).ops)),
    after = new Map(kindCounts(graphOf(b.graph).ops));
  const kinds = [...new Set([...before.keys(), ...after.keys()])].sort();
  const rows = kinds.map((kind) => [kind, before.get(kind) || 0, after.get(kind) || 0]);
  const total = ["in all", graphOf(a.graph).ops.length, graphOf(b.graph).ops.length];
  return el(
    "table",
    { class: "figures kinds-table" },
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        ["kind", "from", "to", ""].map((text, i) => el("th", { class: i ? "right" : null }, text)),
      ),
    ),
    el(
      "tbody",
      {},
      [...rows.sort((x, y) => Math.abs(y[2] - y[1]) - Math.abs(x[2] - x[1])), total].map(([kind, x, y]) =>
        el(
          "tr",
          { class: x === y ? "quiet" : null },
          el("td", {}, kind === "in all" ? kind : el("span", { class: `kind ${family(kind)}` }, kind)),
          el("td", { class: "right mono" }, count(x)),
          el("td", { class: "right mono" }, count(y)),
          el(
            "td",
            { class: `right mono ${y > x ? "added" : y < x ? "removed" : ""}` },
            x === y ? "" : `${y > x ? "+" : "−"}${count(Math.abs(y - x))}`,
          ),
        ),
      ),
    ),
  );
}
