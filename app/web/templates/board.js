// Fetch this page every two seconds and replace the parts that changed.
const poll = async () => {
  const frame = document.querySelector('iframe'), current = document.querySelector('[data-stamp]');
  const url = new URL(location.href);
  if (current && frame) url.searchParams.set('seen', current.dataset.stamp);
  const answer = await fetch(url);
  if (!answer.ok) return;
  const now = new DOMParser().parseFromString(await answer.text(), 'text/html');
  const fresh = now.querySelector('iframe'), stamp = now.querySelector('[data-stamp]');
  if (fresh && !frame) return location.reload();
  if (fresh && current.dataset.stamp !== stamp.dataset.stamp) {
    const top = frame.contentWindow.scrollY;
    frame.onload = () => frame.contentWindow.scrollTo(0, top);
    frame.srcdoc = fresh.srcdoc;
    current.dataset.stamp = stamp.dataset.stamp;
  }
  for (const part of document.querySelectorAll('[data-live]')) {
    const next = now.getElementById(part.id);
    if (!next || next.innerHTML === part.innerHTML) continue;
    const marked = [...part.querySelectorAll(':checked')].map(box => box.value);
    part.innerHTML = next.innerHTML;
    for (const box of part.querySelectorAll('input')) box.checked = marked.includes(box.value);
  }
};
const again = () => poll().catch(() => {}).finally(() => setTimeout(again, 2000));
if (document.querySelector('[data-live]')) setTimeout(again, 2000);
