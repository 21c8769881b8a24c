"""Pages of the documentation site: the Markdown of the repository, and pages made of the source."""
