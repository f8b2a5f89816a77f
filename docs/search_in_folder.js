// Search for a site that is opened from a folder. Browsers start no worker for a local file, so the worker's script runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.scope = new Promise((resolve) => {
        frame.onload = () => resolve(frame.contentWindow);
      });
      this.scope.then((scope) => {
        scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
