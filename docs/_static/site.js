/* The switcher of versions: the list stands in versions.js above all versions, so old pages know newer ones. */
(function () {
  const root = document.documentElement.dataset.content_root || document.documentElement.dataset.contentRoot || "./";
  function show() {
    const known = window.MPISPEED_VERSIONS;
    const select = document.getElementById("versions");
    if (!known || !select) return;
    const own = select.dataset.version;
    const page = location.href.split("#")[0].slice(new URL(root, location.href).href.length) || "index.html";
    const place = (version) => new URL(root + "../" + version + "/index.html", location.href).href;
    select.replaceChildren(...known.versions.map((name) => new Option(name, name, name === own, name === own)));
    select.addEventListener("change", () => { location.href = place(select.value); });
    if (own === known.newest || known.newest === "dev") return;
    const banner = document.createElement("div");
    banner.className = "version-banner";
    banner.append(own === "dev" ? "This is the version under development. " : "This is version " + own + ". ");
    const link = document.createElement("a");
    link.href = place(known.newest);
    link.textContent = "The newest release is " + known.newest + ".";
    banner.append(link);
    document.querySelector(".article-container, .content").prepend(banner);
  }
  const script = document.createElement("script");
  script.src = new URL(root + "../versions.js", location.href).href;
  script.onload = show;
  document.head.append(script);
})();
