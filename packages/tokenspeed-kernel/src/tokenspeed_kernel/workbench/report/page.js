"use strict";
// Sorting and filtering. Without scripts the table is complete, in the order of the operators.
(() => {
  const table = document.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const original = new Map(rows.map((row, place) => [row, place]));

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const value = cell.dataset.value ?? cell.textContent;
    return cell.classList.contains("number") ? (value === "" ? null : Number(value)) : value;
  };

  // Unknown values sort last in both directions.
  const compare = (column, sign) => (a, b) => {
    const [x, y] = [valueOf(a, column), valueOf(b, column)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
    return sign * order || original.get(a) - original.get(b);
  };

  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      body.append(...rows.sort(compare(column, up ? 1 : -1)));
    });
  });

  const form = document.querySelector(".filters");
  const search = document.getElementById("search");
  const choices = [...form.querySelectorAll("select")];
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const chosen = choices.every((choice) => !choice.value || row.dataset[choice.dataset.filter] === choice.value);
      row.hidden = !(chosen && words.every((word) => texts.get(row).includes(word)));
      shown += !row.hidden;
    }
    document.getElementById("count").textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
})();
