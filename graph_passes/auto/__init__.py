"""Recipe "auto": chooses for each linear layer the operator that is fastest here, under a budget of error."""
