// What the artifact is: from its manifest.

const TOWER = 112;

function overviewView() {
  const facts = DATA.overview;
  return el(
    "div",
    { class: "overview" },
    el(
      "div",
      { class: "columns" },
      el("section", { class: "card" }, el("h2", {}, "Artifact"), factList(facts)),
      el("section", { class: "card" }, el("h2", {}, "Keys and values"), ...facts.kv_groups.map(kvGroup)),
      el(
        "section",
        { class: "card" },
        el("h2", {}, "Targets"),
        ...Object.entries(facts.targets).map(targetCard),
      ),
    ),
    el(
      "section",
      { class: "card" },
      el("h2", {}, `Bytes: ${bytes(facts.bytes.total)} in all`),
      bytesTable(facts.bytes),
    ),
    el(
      "section",
      { class: "card" },
      el("h2", {}, "Stages"),
      stagesIntro(),
      stageStrip(null, (name) => go("graph", { stage: name })),
    ),
  );
}

function factList(facts) {
  const { model, source } = facts;
  const frozen = Object.entries(model.frozen || {})
    .map(([k, v]) => `${k}=${v}`)
    .join(", ");
  return definitions([
    ["name", facts.name],
    ["digest", el("code", { class: "digest" }, facts.digest)],
    ["source", `${source.kind} ${source.path}`],
    [
      "made by",
      Object.entries(facts.made_by)
        .map(([k, v]) => `${k} ${v}`)
        .join(", "),
    ],
    ["numbers", model.dtype],
    ["vocabulary", count(model.vocab_size)],
    ["context", plural(model.max_context, "token")],
    ["frozen", frozen || null],
    ["weights", `${count(facts.num_weights)} packed arrays`],
    ["tokenizer", facts.tokenizer.present ? "included" : "none: prompts are token ids"],
  ]);
}

function definitions(pairs) {
  return el(
    "dl",
    {},
    pairs
      .filter(([, value]) => value !== null)
      .map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}

function format(stream) {
  return stream.per === "channel" ? `${stream.dtype} per channel` : stream.dtype;
}

function lifetime(group) {
  if (group.tail) return "the last block, until it is full";
  return group.window === null ? "every token" : `the last ${plural(group.window, "token")}`;
}

function kvGroup(group, number) {
  const streams = group.streams.map((s) => `${s.name} ${format(s)}[${s.heads},${s.head_size}]`).join(", ");
  return el(
    "div",
    { class: "part" },
    el("h3", {}, `group ${number}: ${plural(group.layers, "layer")}`),
    definitions([
      ["keeps", lifetime(group)],
      ["streams", streams],
      ["per token", `${count(group.bytes_per_token)} bytes`],
      ["block", `${plural(group.block, "token")}, ${bytes(group.block_bytes)}`],
    ]),
  );
}

function targetCard([name, target]) {
  const built = Object.entries(target.built_by || {})
    .map(([k, v]) => `${k} ${v}`)
    .join(", ");
  return el(
    "div",
    { class: "part" },
    el("h3", {}, name),
    definitions([
      ...target.kernels.map((k) => [
        k.isa,
        `${k.arch}${k.features.length ? ` with ${k.features.join(", ")}` : ""}`,
      ]),
      ["backend", target.backend ? `${target.backend} ${target.arch}` : null],
      ["built by", built || null],
      [
        "bits",
        target.invariant === undefined
          ? null
          : target.invariant
            ? "the same whatever a request is batched with"
            : "may depend on the batch",
      ],
    ]),
  );
}

function bytesTable({ files, total }) {
  const groups = new Map();
  for (const [name, size] of Object.entries(files)) {
    const folder = name.startsWith("stages/") ? "stages/" : name;
    groups.set(folder, (groups.get(folder) || 0) + size);
  }
  const rows = [...groups].sort((a, b) => b[1] - a[1]);
  const shown = rows.slice(0, 12),
    rest = rows.slice(12);
  if (rest.length)
    shown.push([`${plural(rest.length, "more file")}`, rest.reduce((sum, row) => sum + row[1], 0)]);
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "figures" },
      el(
        "thead",
        {},
        el("tr", {}, el("th", {}, "file"), el("th", { class: "right" }, "bytes"), el("th", {}, "share")),
      ),
      el(
        "tbody",
        {},
        shown.map(([name, size]) =>
          el(
            "tr",
            {},
            el("td", { class: "mono" }, name),
            el("td", { class: "right mono" }, count(size)),
            el("td", { class: "wide" }, bar(size / total, `${((100 * size) / total).toFixed(1)}%`)),
          ),
        ),
      ),
    ),
  );
}

const hasPasses = () => DATA.stages.some((stage) => /^[0-9]/.test(stage.name));

function stagesIntro() {
  return el(
    "p",
    { class: "note" },
    hasPasses()
      ? "The graph after each pass, as tall as it has ops. Choose one to see it."
      : "Only what the kernels run is in this artifact. Compile with --dump-ir DIR to keep every stage.",
  );
}

/** All stages as buttons, as tall as they have ops. */
function stageStrip(chosen, choose) {
  const sizes = DATA.stages.map((stage) => graphOf(stage.graph).ops.length);
  const most = Math.max(1, ...sizes);
  return el(
    "div",
    { class: "strip", role: "group", "aria-label": "stages" },
    DATA.stages.map((stage, i) => {
      const [number, name] = /^[0-9]+-/.test(stage.name) ? stage.name.split(/-(.*)/s) : ["", stage.name];
      const same = i > 0 && DATA.stages[i - 1].graph === stage.graph;
      return el(
        "button",
        {
          class: `stage${same ? " same" : ""}`,
          "aria-current": stage.name === chosen ? "true" : null,
          title: `${stage.name}: ${plural(sizes[i], "op")}${same ? ", the same as before" : ""}`,
          onclick: () => choose(stage.name),
        },
        el(
          "span",
          { class: "tower" },
          styled(el("span", { class: "fill" }), { height: `${((TOWER * sizes[i]) / most).toFixed(1)}px` }),
          el("span", { class: "stage-name" }, name),
        ),
        el("span", { class: "size" }, count(sizes[i])),
        el("span", { class: "stage-number" }, number || "·"),
      );
    }),
  );
}
