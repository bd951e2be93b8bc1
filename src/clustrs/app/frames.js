// Shows one frame of a clip in every picture of the tab.
element.addEventListener('input', (event) => {
  const frame = event.target.value;
  element.querySelector('output').textContent = `${frame} of ${event.target.max}`;
  for (const picture of document.querySelectorAll('#preview [data-frame], #answers [data-frame]')) {
    picture.hidden = picture.dataset.frame !== frame;
  }
});
