"""LDA by collapsed Gibbs sampling on a parameter server.

The topic of every token is a row of the server's as well, keyed by the token. So a worker has no
state, and any worker may do any piece.
"""

import loaders
import numpy as np

from agent.paramserver.api import Application, Stop
from agent.paramserver.tables import Table
from agent.served import ParamServerJob

ALPHA, BETA = 0.5, 0.1


class Topics(Application):
    grainwise = False

    def __init__(self, documents=30, words=40, length=30, kinds=4, clocks=15):
        self.documents, self.words = loaders.topics(documents, words, length, kinds)
        self.items, self.kinds, self.vocabulary = len(self.words), kinds, words
        self.tables = (
            Table("tokens", self.items, 1, "int64", item_state=True),  # topic + 1; 0 is none yet
            Table("words", words, kinds, "int64"),
            Table("documents", documents, kinds, "int64"),
            Table("all", 1, kinds, "int64"),
        )
        self.stop = Stop(clocks=clocks)

    def process_range(self, lo, hi, params):
        tokens = np.arange(lo, hi)
        draw = params.random
        words, at_word = np.unique(self.words[lo:hi], return_inverse=True)
        documents, at_document = np.unique(self.documents[lo:hi], return_inverse=True)
        before = params.read("tokens", tokens)[:, 0]
        old = [
            params.read("words", words),
            params.read("documents", documents),
            params.read("all", [0]),
        ]
        by_word, by_document, by_all = (table.copy() for table in old)
        after = np.zeros_like(before)
        for at, topic in enumerate(before):
            word, document = by_word[at_word[at]], by_document[at_document[at]]
            if topic:
                for row in (word, document, by_all[0]):
                    row[topic - 1] -= 1
            share = np.maximum(document + ALPHA, 1e-9) * np.maximum(word + BETA, 1e-9)
            share /= np.maximum(by_all[0] + BETA * self.vocabulary, 1e-9)
            share /= share.sum()
            new = int(np.searchsorted(share.cumsum(), draw.random()))
            new = min(new, self.kinds - 1)
            params.measure(-float(np.log(share[new])))
            for row in (word, document, by_all[0]):
                row[new] += 1
            after[at] = new + 1
        params.update("tokens", tokens, (after - before)[:, None])
        params.update("words", words, by_word - old[0])
        params.update("documents", documents, by_document - old[1])
        params.update("all", [0], by_all - old[2])


if __name__ == "__main__":
    application = Topics()
    alone = ParamServerJob(application, slack=1).run()
    for clock, surprise in enumerate(alone.measures if alone else ()):
        print(f"clock {clock:3}  surprise of a token {surprise / application.items:.4f}")
