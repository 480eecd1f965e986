// The memory plan over the kernels of a step: which value lies where, from when to when.

const PLOT = { height: 420, live: 90, gap: 26, left: 74, bottom: 26 };

/** Bytes of a form [per T, per R, per Q, fixed] at a step's sizes, each rounded up to 16. */
function formBytes(form, sizes) {
  const up = (n) => Math.ceil(n / 16) * 16;
  return form[3] + form[0] * up(sizes.T) + form[1] * up(sizes.R) + form[2] * up(sizes.Q);
}

function memoryView(params) {
  if (!DATA.memory.length) return el("p", { class: "note" }, "No memory is planned in this artifact.");
  const plan = DATA.memory.find((each) => each.target === params.get("target")) || DATA.memory[0];
  const sizes = Object.fromEntries(
    ["T", "R", "Q"].map((name) => [name, sizeOf(params.get(name), plan.sizes[name])]),
  );
  const layout = layoutOf(plan, sizes);
  const where = (changed) => go("memory", { target: plan.target, ...sizes, ...changed });
  const details = el(
    "div",
    { class: "memory-details", "aria-live": "polite" },
    el("p", { class: "note" }, "Point at a rectangle to see what it is."),
  );
  return el(
    "div",
    { class: "memory" },
    el(
      "div",
      { class: "toolbar" },
      select(
        "target",
        DATA.memory.map((each) => [each.target, each.target]),
        plan.target,
        (target) => go("memory", { target }),
      ),
      sizeField("T", "tokens in the step", sizes, where),
      sizeField("R", "requests", sizes, where),
      sizeField("Q", "rows of logits", sizes, where),
    ),
    memoryFacts(plan, layout),
    el("div", { class: "card plot" }, drawing(plan, layout, details)),
    details,
    el(
      "p",
      { class: "note" },
      "Across: the kernels of one step, in the order in which they run. Up: bytes of the arena. ",
      "Its buffers lie one after the other (lines); ",
      "a rectangle is a value from the kernel that writes it to the last that reads it, or scratch space ",
      "(hatched) of one kernel. A buffer is as large as the largest value ",
      "that it ever holds, so what is empty above a rectangle is the price of sharing. Bytes are exact for ",
      "the chosen sizes, each rounded up to 16 tokens, requests and rows; ",
      "weights, keys and values, and the logits lie elsewhere.",
    ),
  );
}

const sizeOf = (text, fallback) => (/^[0-9]{1,7}$/.test(text || "") ? Number(text) : fallback);

function sizeField(name, label, sizes, where) {
  const box = el("input", {
    type: "number",
    min: "0",
    max: "9999999",
    value: sizes[name],
    onchange: () => where({ [name]: sizeOf(box.value, sizes[name]) }),
  });
  return el("label", { class: "field" }, el("span", {}, `${name}, ${label}`), box);
}

/** Buffers' offsets and bytes, pieces in bytes, and the bytes in use in each kernel. */
function layoutOf(plan, sizes) {
  const buffers = plan.buffers.map((form) => formBytes(form, sizes));
  const offsets = [];
  let total = 0;
  for (const size of buffers) {
    offsets.push(total);
    total += size;
  }
  const forms = plan.forms.map((form) => formBytes(form, sizes));
  const pieces = plan.pieces.map(([name, scratch, buffer, first, last, form]) => ({
    name: TEXTS[name],
    scratch: Boolean(scratch),
    buffer,
    first,
    last,
    bytes: forms[form],
  }));
  const live = plan.kernels.map(() => 0);
  for (const piece of pieces) for (let k = piece.first; k <= piece.last; k += 1) live[k] += piece.bytes;
  const peak = live.reduce((best, value, k) => (value > live[best] ? k : best), 0);
  return { buffers, offsets, total, pieces, live, peak };
}

function memoryFacts(plan, layout) {
  const [label, loc] = plan.kernels[layout.peak] || [0, 0];
  const most = layout.live[layout.peak] || 0;
  const fact = (value, text) =>
    el("div", { class: "fact" }, el("strong", {}, value), el("span", { class: "note" }, text));
  const alone = layout.pieces.reduce((sum, piece) => sum + piece.bytes, 0);
  return el(
    "div",
    { class: "facts", "data-arena": layout.total, "data-peak": most, "data-pieces": layout.pieces.length },
    fact(bytes(layout.total), `the arena: ${plural(layout.buffers.length, "buffer")}`),
    fact(
      bytes(most),
      `in use at once at most, in kernel ${layout.peak}: ${TEXTS[label]}${TEXTS[loc] ? `, ${TEXTS[loc]}` : ""}`,
    ),
    fact(
      layout.total ? `${((100 * most) / layout.total).toFixed(1)}%` : "–",
      "of the arena is in use at the peak",
    ),
    fact(bytes(alone), `what ${plural(layout.pieces.length, "value")} would take without sharing`),
  );
}

function drawing(plan, layout, details) {
  const width = Math.max(1160, plan.kernels.length * 3);
  const step = (width - PLOT.left) / Math.max(plan.kernels.length, 1);
  const x = (k) => PLOT.left + k * step;
  const y = (offset) => PLOT.height - (PLOT.height * offset) / Math.max(layout.total, 1);
  const top = PLOT.live + PLOT.gap;
  const all = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${top + PLOT.height + PLOT.bottom}`,
      role: "img",
      "aria-label": "The memory plan over the kernels of a step",
    },
    svg(
      "defs",
      {},
      svg(
        "pattern",
        { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        svg("rect", { width: 5, height: 5, class: "hatch-back" }),
        svg("line", { x1: 0, y1: 0, x2: 0, y2: 5, class: "hatch-line" }),
      ),
    ),
    liveArea(layout, x),
    svg(
      "g",
      { transform: `translate(0 ${top})` },
      svg("rect", { x: PLOT.left, y: 0, width: width - PLOT.left, height: PLOT.height, class: "arena" }),
      layerBands(plan, x),
      layout.buffers.map((size, i) => [
        svg("line", {
          x1: PLOT.left,
          x2: width,
          y1: y(layout.offsets[i]),
          y2: y(layout.offsets[i]),
          class: "buffer-line",
        }),
        y(layout.offsets[i]) - y(layout.offsets[i] + size) > 11
          ? svg(
              "text",
              { x: PLOT.left - 6, y: y(layout.offsets[i] + size / 2) + 3, class: "axis end" },
              `${i}: ${bytes(size)}`,
            )
          : null,
      ]),
      layout.pieces.map((piece) => pieceRect(plan, layout, piece, x, y, step, details)),
      svg("line", {
        x1: x(layout.peak) + step / 2,
        x2: x(layout.peak) + step / 2,
        y1: -PLOT.gap + 4,
        y2: PLOT.height,
        class: "peak-line",
      }),
      axis(plan, x),
    ),
  );
  return el("div", { class: "scroll" }, all);
}

function pieceRect(plan, layout, piece, x, y, step, details) {
  const bottom = layout.offsets[piece.buffer],
    height = Math.max(y(bottom) - y(bottom + piece.bytes), 0.75);
  const show = () => showPiece(plan, layout, piece, details);
  return svg(
    "rect",
    {
      x: x(piece.first) + 0.4,
      y: y(bottom + piece.bytes),
      width: Math.max((piece.last - piece.first + 1) * step - 0.8, 0.8),
      height,
      class: `piece ${piece.scratch ? "scratch" : family(kernelKind(plan, piece.first))}`,
      tabindex: "0",
      onmouseenter: show,
      onfocus: show,
      "data-bytes": piece.bytes,
      "aria-label": `${piece.name}, ${bytes(piece.bytes)}`,
    },
    svg("title", {}, `${piece.name}: ${bytes(piece.bytes)}`),
  );
}

const kernelKind = (plan, k) => TEXTS[plan.kernels[k][0]].split(/[ +]/)[0];

function showPiece(plan, layout, piece, details) {
  const kernel = (k) =>
    `${k}: ${TEXTS[plan.kernels[k][0]]}${TEXTS[plan.kernels[k][1]] ? `, ${TEXTS[plan.kernels[k][1]]}` : ""}`;
  details.replaceChildren(
    definitions([
      [
        piece.scratch ? "scratch" : "value",
        el("code", {}, piece.scratch ? `of %${piece.name.replace(/\.scratch$/, "")}` : `%${piece.name}`),
      ],
      ["bytes", `${count(piece.bytes)}, of buffer ${piece.buffer}'s ${count(layout.buffers[piece.buffer])}`],
      ["offset", `${count(layout.offsets[piece.buffer])} in the arena`],
      [piece.scratch ? "in kernel" : "written by", kernel(piece.first)],
      piece.scratch ? ["", null] : ["last read by", kernel(piece.last)],
    ]),
  );
}

/** Bytes in use in each kernel, above the plan. */
function liveArea(layout, x) {
  const most = layout.live[layout.peak] || 1;
  const y = (value) => PLOT.live - ((PLOT.live - 14) * value) / most;
  let path = `M${x(0)} ${PLOT.live}`;
  layout.live.forEach((value, k) => {
    path += ` L${x(k)} ${y(value)} L${x(k + 1)} ${y(value)}`;
  });
  return svg(
    "g",
    {},
    svg("path", { d: `${path} L${x(layout.live.length)} ${PLOT.live} Z`, class: "live" }),
    svg("text", { x: PLOT.left - 6, y: 18, class: "axis end" }, bytes(most)),
    svg("text", { x: PLOT.left - 6, y: PLOT.live, class: "axis end" }, "in use"),
  );
}

/** Every other layer shaded, with its number where there is room. */
function layerBands(plan, x) {
  const bands = [];
  plan.kernels.forEach(([, loc], k) => {
    const found = /^(.*?[0-9]+)(?:\.|$)/.exec(TEXTS[loc]);
    const name = found && /(^|\.)[0-9]+$/.test(found[1]) ? found[1] : "";
    const last = bands[bands.length - 1];
    if (last && last.name === name) last.to = k + 1;
    else bands.push({ name, from: k, to: k + 1 });
  });
  return bands
    .filter((band) => band.name)
    .map((band, i) =>
      svg(
        "g",
        {},
        i % 2
          ? null
          : svg("rect", {
              x: x(band.from),
              y: 0,
              width: x(band.to) - x(band.from),
              height: PLOT.height,
              class: "band",
            }),
        x(band.to) - x(band.from) > 16
          ? svg(
              "text",
              { x: (x(band.from) + x(band.to)) / 2, y: PLOT.height + 14, class: "axis middle" },
              band.name.split(".").pop(),
            )
          : null,
      ),
    );
}

function axis(plan, x) {
  return svg("text", { x: x(0) - 6, y: PLOT.height + 14, class: "axis end" }, "layer");
}
