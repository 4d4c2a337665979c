"""takes nodes from `node`, gives `api` one contract, whether there is one machine or many."""
