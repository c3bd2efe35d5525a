"""The generated reference pages, one module a page: ``page()`` returns its Markdown."""
