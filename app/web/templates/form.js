// Show the fields that the choices need, and the command of the form as one types.
const form = document.getElementById('new');
const upload = form && form.elements.upload;

const showFields = () => {
  for (const field of form.querySelectorAll('[data-for]')) {
    const [group, choice] = field.dataset.for.split('=');
    field.hidden = form.elements[group].value !== choice;
    field.querySelector('input').disabled = field.hidden;
  }
};

const checkSize = () => {
  const file = upload.files[0], isLarge = file && file.size > Number(upload.dataset.max);
  upload.setCustomValidity(isLarge ? 'Larger than 2 GB. Copy the file to this machine and enter its path.' : '');
};

let isBusy = false, isStale = false, timer;
const showCommand = async () => {
  isStale = isBusy;
  if (isBusy) return;
  isBusy = true;
  try {
    const data = new FormData(form);
    if (data.has('upload')) data.set('upload', data.get('upload').name);  // the file is sent with a button
    const answer = await fetch('/command', {method: 'POST', body: data});
    if (answer.ok) update(new DOMParser().parseFromString(await answer.text(), 'text/html'));
  } catch { /* the board has stopped */ }
  isBusy = false;
  if (isStale) showCommand();
};

const update = page => {
  document.getElementById('preview').innerHTML = page.getElementById('preview').innerHTML;
  for (const field of page.querySelectorAll('input[placeholder]')) {
    form.elements[field.name].placeholder = field.placeholder;
  }
};

if (form) {
  showFields();
  showCommand();  // fields may be filled already: browsers restore them
  form.addEventListener('input', () => {
    showFields();
    checkSize();
    clearTimeout(timer);
    timer = setTimeout(showCommand, 300);
  });
}
