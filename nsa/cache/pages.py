"""Allocator of pages for sequences, which may share pages."""

from __future__ import annotations

from collections.abc import Sequence

from nsa.errors import check


class Pages:
    """Pages of equal size, allocated as sequences grow.

    Shared pages are copied on write.

    Args:
        num_pages: number of pages.
        page_size: tokens of a page.
        num_sequences: number of sequences.

    Attributes:
        held: pages of each sequence, in order of its tokens.
        uses: number of sequences that use each page.
        changed: new pages by sequence and position, cleared when the page table is written.
    """

    def __init__(self, num_pages: int, page_size: int, num_sequences: int) -> None:
        self.page_size = page_size
        self.held: list[list[int]] = [[] for _ in range(num_sequences)]
        self.uses = [0] * num_pages
        self.changed: dict[tuple[int, int], int] = {}
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._free)

    def prepare(self, lengths: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """Allocate pages for ``counts[b]`` tokens after the ``lengths[b]`` of each sequence b.

        Returns:
            Pages to copy, ``(from, to)``, before new tokens are written.

        Raises:
            ValueError: too few pages are free. No page has been allocated.
        """
        grown, shared = list[tuple[int, int]](), list[int]()
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            missing = -(-(length + count) // self.page_size) - len(self.held[b])
            grown += [(b, missing)] if missing > 0 else []
            place = length // self.page_size  # first page to be written
            if count and place < len(self.held[b]) and self.uses[self.held[b][place]] > 1:
                shared.append(b)
        # Copy-on-write: the last writer keeps the page.
        left = dict[int, int]()
        copied = list[int]()
        for b in shared:
            page = self.held[b][lengths[b] // self.page_size]
            left[page] = left.get(page, self.uses[page]) - 1
            copied += [b] if left[page] > 0 else []
        wanted = sum(missing for _, missing in grown) + len(copied)
        rule = f"leave {wanted} pages of {self.page_size} tokens free for the new tokens"
        check(wanted <= self.num_free, "num_pages", rule, f"{self.num_free} free")
        copies = []
        for b in copied:
            place = lengths[b] // self.page_size
            copies.append((self.held[b][place], self._take()))
            self._give_back(self.held[b][place])
            self.held[b][place] = self.changed[b, place] = copies[-1][1]
        for b, missing in grown:
            self._extend(b, [self._take() for _ in range(missing)])
        return copies

    def fork(self, source: int, target: int, length: int) -> None:
        """Share the pages of a sequence's ``length`` tokens with an empty sequence.

        Reserved pages without tokens are not shared: both sequences would write to them.
        """
        self.truncate(target, 0)
        self._extend(target, self.held[source][: -(-length // self.page_size)])
        for page in self.held[target]:
            self.uses[page] += 1

    def reorder(self, indices: Sequence[int], lengths: Sequence[int]) -> None:
        """Replace the pages of each sequence b by those of ``indices[b]``.

        Pages with tokens, by the ``lengths`` before, are shared. Reserved pages without tokens stay
        only with their own sequence.
        """
        before = self.held
        self.held = [
            list(before[source][: None if source == b else -(-lengths[source] // self.page_size)])
            for b, source in enumerate(indices)
        ]
        for page in (page for pages in self.held for page in pages):
            self.uses[page] += 1
        for b, (old, new) in enumerate(zip(before, self.held, strict=True)):
            for page in reversed(old):
                self._give_back(page)
            for place, page in enumerate(new):
                if old[place : place + 1] != [page]:
                    self.changed[b, place] = page

    def truncate(self, sequence: int, length: int) -> None:
        """Free the pages after the first ``length`` tokens of a sequence."""
        kept = -(-length // self.page_size)
        for page in reversed(self.held[sequence][kept:]):
            self._give_back(page)
        del self.held[sequence][kept:]

    def _extend(self, sequence: int, pages: Sequence[int]) -> None:
        for place, page in enumerate(pages, start=len(self.held[sequence])):
            self.changed[sequence, place] = page
        self.held[sequence] += pages

    def _take(self) -> int:
        page = self._free.pop()
        self.uses[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        self.uses[page] -= 1
        if not self.uses[page]:
            self._free.append(page)
