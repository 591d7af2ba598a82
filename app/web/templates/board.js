// Change the parts of a page that differ from a new version; what the user typed, opened or selected stays.
const morph = (old, next) => {
  if (old.isEqualNode(next)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.data = next.data;
    return;
  }
  if ('defaultValue' in old && old.defaultValue !== next.defaultValue) old.value = next.defaultValue;
  for (const {name, value} of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const {name} of [...old.attributes]) if (name !== 'open' && !next.hasAttribute(name)) old.removeAttribute(name);
  next.childNodes.forEach((child, at) => {
    const same = child.id && [...old.children].find(other => other.id === child.id);
    while (same && old.childNodes[at] !== same) old.childNodes[at].remove();
    const there = old.childNodes[at] ?? null;
    if (there?.nodeName === child.nodeName && there.id === child.id) morph(there, child);
    else old.insertBefore(child.cloneNode(true), there);
  });
  while (old.childNodes.length > next.childNodes.length) old.lastChild.remove();
};

// Fetch this page every two seconds, or the chat alone while an answer grows.
const refresh = async address => {
  const answer = await fetch(address);
  if (!answer.ok) return;
  const now = new DOMParser().parseFromString(await answer.text(), 'text/html');
  for (const part of document.querySelectorAll('[data-live]')) {
    const next = now.getElementById(part.id);
    if (!next) continue;
    const marked = [...part.querySelectorAll(':checked')].map(box => box.value);
    morph(part, next);
    for (const box of part.querySelectorAll('[type=checkbox]')) box.checked = marked.includes(box.value);
  }
};
const busy = () => document.querySelector('[data-busy]');
let waiting;
const later = delay => {
  clearTimeout(waiting);
  waiting = setTimeout(() => refresh(busy() ? busy().dataset.busy : location.href).catch(() => {}).finally(again), delay);
};
const again = () => later(busy() ? 300 : 2000);
if (document.querySelector('[data-live]')) again();

// Send a form without leaving the page, which shows the answer as it grows.
document.addEventListener('submit', async event => {
  const form = event.target, action = event.submitter?.name;
  if (!form.matches('[data-send]')) return;
  event.preventDefault();
  if (!action && busy()) return;
  const body = new FormData(form, event.submitter), field = form.elements.question, text = field.value;
  if (!action) field.value = '';
  later(100);
  const answer = await fetch(form.action, {method: 'POST', body, redirect: 'manual'}).catch(() => null);
  if (!action && answer?.type !== 'opaqueredirect') field.value = text;
  later(0);
});
document.addEventListener('keydown', event => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing || event.target.name !== 'question') return;
  event.preventDefault();
  event.target.form.requestSubmit();
});
