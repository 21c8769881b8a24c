"""Site files of tests, as `MPISPEED_SITE_FILE` names them."""

from mpispeed.base.site_file import VARIABLE, hold


def written_sites(tmp_path, monkeypatch, default):
    """Yield a function that writes the file and gives its path; `default` is its text if none is given."""
    path = tmp_path / "site.toml"
    monkeypatch.setenv(VARIABLE, str(path))

    def write(text=default):
        path.write_text(text)
        path.chmod(0o644)
        return path

    tmp_path.chmod(0o700)
    yield write
    hold(None)
