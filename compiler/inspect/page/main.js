// Which view is shown: the address says it, so that every view has a link. #graph?stage=09-fuse_norm&op=%25x

const VIEWS = {
  overview: ["Overview", overviewView],
  graph: ["Graph", graphView],
  diff: ["Changes", diffView],
  memory: ["Memory", memoryView],
  kernels: ["Kernels", kernelsView],
};

function address(view, params) {
  const given = Object.entries(params).filter(
    ([, value]) => value !== null && value !== undefined && value !== "",
  );
  const text = new URLSearchParams(given).toString();
  return `#${view}${text ? `?${text}` : ""}`;
}

function go(view, params = {}) {
  location.hash = address(view, params);
}

/** The address follows what is chosen within a view, which is not drawn again. */
function replaceParams(view, params) {
  history.replaceState(null, "", address(view, params));
}

function draw() {
  const [name, text] = location.hash.slice(1).split(/\?(.*)/s);
  const view = Object.hasOwn(VIEWS, name) ? name : "overview";
  document.getElementById("top").replaceChildren(banner(view));
  const place = document.getElementById("view");
  place.replaceChildren(VIEWS[view][1](new URLSearchParams(text || "")));
  document.body.dataset.view = view;
  const current = place.querySelector(".strip [aria-current]");
  if (current) current.parentNode.scrollLeft = current.offsetLeft - current.parentNode.clientWidth / 2;
}

function banner(view) {
  return el(
    "div",
    { class: "banner" },
    el(
      "div",
      { class: "brand" },
      el("span", { class: "mark", "aria-hidden": "true" }, "8ᵛᵒ"),
      el("h1", {}, DATA.overview.name),
    ),
    el(
      "nav",
      { "aria-label": "views" },
      Object.entries(VIEWS).map(([name, [title]]) =>
        el("a", { href: address(name, {}), "aria-current": name === view ? "page" : null }, title),
      ),
    ),
  );
}

addEventListener("hashchange", () => {
  draw();
  scrollTo(0, 0);
});
draw();
