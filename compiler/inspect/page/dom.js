"use strict";
// Elements from text: nothing of an artifact ever becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. props: attributes; on* are listeners, class is className. children: elements, texts, null. */
function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function styled(node, properties) {
  for (const [name, value] of Object.entries(properties)) node.style.setProperty(name, value);
  return node;
}

const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (n >= 1000 && power < units.length - 1) {
    n /= 1000;
    power += 1;
  }
  return `${power === 0 || n >= 100 ? Math.round(n) : n.toPrecision(3)} ${units[power]}`;
}

function select(label, options, chosen, onchange) {
  const box = el(
    "select",
    { onchange: () => onchange(box.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
  return el("label", { class: "field" }, el("span", {}, label), box);
}

/** A bar of a share, 0 to 1, behind its text. */
function bar(share, text, kind = "") {
  const inner = styled(el("span", { class: `bar ${kind}` }), { width: `${(100 * share).toFixed(2)}%` });
  return el("span", { class: "barred" }, inner, el("span", { class: "figure" }, text));
}
