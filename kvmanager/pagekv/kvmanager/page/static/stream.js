// The connection to the manager: server-sent events. It is opened again after errors, and closed while the page is
// hidden.

const RETRY_MS = 2000;
// A manager says something at least every five seconds. A connection on which nothing comes for so long is lost, though
// nothing has closed it: the computer has slept, or a router on the way has forgotten it.
const SILENT_MS = 15000;

export class Stream {
  // `onMessage` gets each message. `onLink` gets true when connected and false after an error.
  constructor(url, onMessage, onLink) {
    Object.assign(this, { url, onMessage, onLink, source: null, timer: 0, silence: 0 });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    if (!document.hidden) this.open();
  }

  open() {
    if (this.source) return;
    clearTimeout(this.timer);
    const source = (this.source = new EventSource(this.url));
    this.listen();
    source.onopen = () => {
      this.listen();
      this.onLink(true);
    };
    source.onmessage = (event) => {
      this.listen();
      this.onMessage(JSON.parse(event.data));
    };
    source.addEventListener("alive", () => this.listen());
    // EventSource retries by itself, but not after an error status such as that for too many viewers.
    source.onerror = () => this.retry();
  }

  // Waits for what comes next.
  listen() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.retry(), SILENT_MS);
  }

  retry() {
    this.close();
    this.onLink(false);
    this.timer = setTimeout(() => this.open(), RETRY_MS);
  }

  close() {
    clearTimeout(this.timer);
    clearTimeout(this.silence);
    this.source?.close();
    this.source = null;
  }
}

// Returns the JSON at `url`. Throws an Error with the manager's text.
export async function ask(url, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  const response = await fetch(url, options);
  if (response.ok) return response.json();
  const { error } = await response.json().catch(() => ({}));
  throw new Error(error ?? `the manager answered ${response.status} ${response.statusText}`);
}
