"""Token stores: the token ids of documents in one HDF5 file, built from texts and other files, and read as samples."""

from mpispeed.tokens.blend import TokenBlend
from mpispeed.tokens.columns import add_column
from mpispeed.tokens.documents import TokenDocuments
from mpispeed.tokens.errors import NoTokenStore, TokenStoreError, UnfinishedStore
from mpispeed.tokens.masks import document_mask, sequence_ends
from mpispeed.tokens.packed import TokenRows
from mpispeed.tokens.store import TokenStore, open_store
from mpispeed.tokens.windows import TokenWindows
from mpispeed.tokens_build.api import build_store, import_store, merge_stores, open_on_node
from mpispeed.tokens_build.errors import BuildError

__all__ = [
    "BuildError", "NoTokenStore", "TokenBlend", "TokenDocuments", "TokenRows", "TokenStore", "TokenStoreError",
    "TokenWindows", "UnfinishedStore", "add_column", "build_store", "document_mask", "import_store", "merge_stores",
    "open_on_node", "open_store", "sequence_ends",
]  # fmt: skip
