// Tells the server which button of a table was chosen: its data attributes are the event's data.
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-method], button[data-index]');
  if (button) trigger('select', { ...button.dataset });
});
