// Search from files: browsers start no Worker from a file, so its script runs in an empty frame of the page instead.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const load = (address) => new Promise((loaded) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = new URL(address, location.href).href;
        script.onload = loaded;
        this.frame.contentDocument.body.append(script);
      });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...addresses) => Promise.all(addresses.map(load));
      this.ready = load(url);
    }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() { this.frame.remove(); }
  };
}
