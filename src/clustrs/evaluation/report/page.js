"use strict";
// Numbers of all methods at the level under the pointer, and legends that switch curves on and off.
// Without this script the curves are still there, and every mark has its numbers as a title.
document.querySelectorAll("figure").forEach((figure) => {
  const hidden = new Set();
  const curves = [...figure.querySelectorAll("[data-curve]")];
  const show = () => curves.forEach((curve) => { curve.style.display = hidden.has(curve.dataset.curve) ? "none" : ""; });
  figure.querySelectorAll(".legend li").forEach((entry) => {
    entry.tabIndex = 0;
    entry.setAttribute("role", "switch");
    entry.setAttribute("aria-checked", "true");
    const toggle = () => {
      const key = entry.dataset.key;
      if (hidden.has(key)) { hidden.delete(key); } else { hidden.add(key); }
      entry.setAttribute("aria-checked", String(!hidden.has(key)));
      show();
    };
    entry.addEventListener("click", toggle);
    entry.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); }
    });
  });
  figure.querySelectorAll(".panel").forEach((panel) => {
    const svg = panel.querySelector("svg");
    const ruler = svg.querySelector(".ruler");
    const box = document.createElement("div");
    box.className = "numbers";
    box.hidden = true;
    panel.append(box);
    const ticks = [...svg.querySelectorAll(".tick")].map((tick) => ({ x: Number(tick.dataset.x), text: tick.textContent }));
    const leave = () => { box.hidden = true; ruler.style.display = ""; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect();
      const x = (event.clientX - frame.left) * svg.viewBox.baseVal.width / frame.width;
      let index = 0;
      ticks.forEach((tick, i) => { if (Math.abs(tick.x - x) < Math.abs(ticks[index].x - x)) { index = i; } });
      const marks = [...svg.querySelectorAll(`[data-tick="${index}"]`)].filter(
        (mark) => !hidden.has(mark.closest("[data-curve]").dataset.curve));
      if (!marks.length) { leave(); return; }
      box.replaceChildren();
      const head = document.createElement("b");
      head.textContent = ticks[index].text;
      box.append(head);
      marks.forEach((mark) => {
        const line = document.createElement("span");
        line.textContent = mark.querySelector("title").textContent;
        line.style.borderColor = getComputedStyle(mark.closest("[data-curve]")).color;
        box.append(line);
      });
      ruler.setAttribute("transform", `translate(${ticks[index].x} 0)`);
      ruler.style.display = "inline";
      box.hidden = false;
      const right = ticks[index].x > svg.viewBox.baseVal.width / 2;
      box.style.left = right ? "" : `${ticks[index].x / svg.viewBox.baseVal.width * 100 + 2}%`;
      box.style.right = right ? `${100 - ticks[index].x / svg.viewBox.baseVal.width * 100 + 2}%` : "";
    });
  });
});
// A click on a heading sorts a table, another one turns the order; not a table whose rows are in groups.
document.querySelectorAll("table").forEach((table) => {
  const body = table.tBodies[0];
  const heads = [...table.querySelectorAll("thead th")];
  if (body.querySelector(".opens")) { return; }
  const key = (row, index) => (row.cells[index].querySelector(".number") || row.cells[index]).textContent;
  heads.forEach((head, index) => {
    const sort = () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => ({ row, text: key(row, index), number: parseFloat(key(row, index)) }));
      rows.sort((a, b) => {
        if (isNaN(a.number) !== isNaN(b.number)) { return isNaN(a.number) ? 1 : -1; }
        return (down ? -1 : 1) * (isNaN(a.number) ? a.text.localeCompare(b.text) : a.number - b.number);
      });
      body.append(...rows.map(({ row }) => row));
    };
    head.tabIndex = 0;
    head.setAttribute("aria-sort", "none");
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") { sort(); } });
  });
});
// Paper has no folds.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
