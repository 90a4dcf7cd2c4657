"""Recipe "auto": measure which operator and format are fastest for each layer, within an error budget."""
