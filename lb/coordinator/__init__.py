"""The coordinator process: everybody's reports in, one whole group state and one load snapshot out."""
