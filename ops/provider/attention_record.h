// Stores an attention, without its linear layers, in a compiled model. README.md shows the layout.
#pragma once

#include <unordered_map>

#include "provider/attention.h"
#include "provider/io_slots.h"

namespace ortolan::provider {

// inputs: the input index of each value that the attention reads at run time.
void WriteAttention(const Attention& attention, const std::unordered_map<Value, size_t>& inputs, ContextWriter& writer);

// width: columns of each of query, key and value. Operands are inputs of the EPContext node; constant masks are
// stored in the file. Throws OpError.
Attention ReadAttention(ContextReader& reader, const IoSlots& slots, int64_t width);

}  // namespace ortolan::provider
