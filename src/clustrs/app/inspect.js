// Links the images, the attention maps and the points of the Inspect tab. `element` is the part of the page it lives in;
// its content is replaced whenever another image is inspected, so all listeners sit on the element itself.
const views = () => [...element.querySelectorAll('.cl-view')];
const tokensOf = (view) => {
  view.columns ??= JSON.parse(view.dataset.tokens);
  return view.columns;
};
const marks = (view, index) => view.querySelectorAll(`[data-i="${index}"]`);
const fixed = (value, digits) => (value === null || value === undefined ? '–' : Number(value).toPrecision(digits));

function members(tokens, index) {
  const cluster = tokens.cluster[index];
  return cluster === null ? [index] : tokens.cluster.flatMap((other, i) => (other === cluster ? [i] : []));
}

function cell(row, kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  row.append(made);
}

function table(tokens, group) {
  const made = document.createElement('table');
  made.className = 'cl-table cl-members';
  const head = made.createTHead().insertRow();
  const numbers = ['score', 'distance', 'alpha'].filter((name) => group.some((i) => tokens[name][i] !== null));
  for (const title of ['token', ...numbers]) cell(head, 'th', title);
  const body = made.createTBody();
  const order = [...group].sort((a, b) => tokens.kept[b] - tokens.kept[a] || tokens.score[b] - tokens.score[a]);
  for (const i of order) {
    const row = body.insertRow();
    if (tokens.kept[i]) row.className = 'kept';
    const crop = tokens.tile[i] ? `, crop ${tokens.tile[i] + 1}` : '';
    cell(row, 'td', `row ${tokens.y[i] + 1}, column ${tokens.x[i] + 1}${crop}${tokens.kept[i] ? ' (kept)' : ''}`);
    for (const name of numbers) cell(row, 'td', fixed(tokens[name][i], 3));
  }
  return made;
}

function describe(view, tokens, index, group) {
  const box = document.createElement('div');
  const line = document.createElement('p');
  const strong = document.createElement('strong');
  strong.textContent = view.dataset.title;
  const alone = element.querySelector('.cl-inspection').dataset.clusters === 'no';
  const kept = group.find((i) => tokens.kept[i]);
  const name = (i) => `row ${tokens.y[i] + 1}, column ${tokens.x[i] + 1}`;
  const state = tokens.kept[index] ? 'is kept' : kept === undefined ? 'is dropped' : `is dropped, ${name(kept)} stands for it`;
  const size = alone || tokens.cluster[index] === null ? '' : `; cluster of ${group.length}`;
  line.append(strong, `: ${name(index)} ${state}${size}`);
  const scroll = document.createElement('div');
  scroll.className = 'cl-scroll';
  scroll.tabIndex = 0;
  scroll.append(table(tokens, group));
  box.append(line, scroll);
  return box;
}

function choose(index) {
  const list = element.querySelector('.cl-choose');
  const own = [...list.options].find((option) => option.value.endsWith(`:${index}`));
  list.value = own ? own.value : '';
  const boxes = [];
  for (const view of views()) {
    const tokens = tokensOf(view);
    const group = members(tokens, index);
    view.classList.add('cl-lit');
    view.querySelectorAll('.member, .chosen').forEach((mark) => mark.classList.remove('member', 'chosen'));
    for (const i of group) marks(view, i).forEach((mark) => mark.classList.add('member'));
    marks(view, index).forEach((mark) => mark.classList.add('chosen'));
    boxes.push(describe(view, tokens, index, group));
  }
  element.querySelector('.cl-chosen').replaceChildren(...boxes);
}

function nearest(view, from, key) {
  const tokens = tokensOf(view);
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  let best = null;
  for (const rect of view.querySelectorAll('.cl-image .kept')) {
    const i = Number(rect.dataset.i);
    const x = tokens.x[i] - tokens.x[from];
    const y = tokens.y[i] - tokens.y[from];
    const ahead = x * dx + y * dy;
    const cost = ahead + 2 * Math.abs(x * dy + y * dx);
    if (ahead > 0 && (best === null || cost < best.cost)) best = { rect, cost };
  }
  return best && best.rect;
}

element.addEventListener('click', (event) => {
  const mark = event.target.closest('[data-i]');
  if (mark) choose(Number(mark.dataset.i));
});

element.addEventListener('change', (event) => {
  if (event.target.matches('.cl-choose') && event.target.value) choose(Number(event.target.value.split(':')[1]));
});

element.addEventListener('keydown', (event) => {
  const mark = event.target.closest('.cl-image .kept');
  if (!mark) return;
  if (event.key === 'Enter' || event.key === ' ') {
    event.preventDefault();
    choose(Number(mark.dataset.i));
  } else if (event.key.startsWith('Arrow')) {
    event.preventDefault();
    const next = nearest(mark.closest('.cl-view'), Number(mark.dataset.i), event.key);
    if (next) {
      mark.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  }
});

for (const [name, on] of [['mouseover', true], ['mouseout', false]]) {
  element.addEventListener(name, (event) => {
    const mark = event.target.closest('[data-i]');
    if (mark) for (const view of views()) marks(view, mark.dataset.i).forEach((one) => one.classList.toggle('hover', on));
  });
}
