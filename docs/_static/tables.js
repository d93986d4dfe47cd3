// A table or a block of code that goes on to the right fades there, until it is scrolled to its end.
const boxes = ".bd-content pre, .pst-scrollable-table-container";

const mark = (box) =>
  box.classList.toggle("goes-on", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);

addEventListener("DOMContentLoaded", () => {
  const observer = new ResizeObserver((entries) =>
    entries.forEach(({ target }) => mark(target.closest(boxes))),
  );
  for (const box of document.querySelectorAll(boxes)) {
    box.addEventListener("scroll", () => mark(box), { passive: true });
    observer.observe(box);
    if (box.firstElementChild) observer.observe(box.firstElementChild);
  }
});
