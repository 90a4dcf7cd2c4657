// Attention in the record of a compiled model, but for its layers. README.md draws it.
#pragma once

#include <unordered_map>

#include "provider/attention.h"
#include "provider/io_slots.h"

namespace ortolan::provider {

// inputs: of what the attention reads, the numbers.
void WriteAttention(const Attention& attention, const std::unordered_map<Value, size_t>& inputs, ContextWriter& writer);

// width: of the queries, of the keys and of the values. Operands are values of the EPContext node; constant masks are
// stored in the file. Throws OpError.
Attention ReadAttention(ContextReader& reader, const IoSlots& slots, int64_t width);

}  // namespace ortolan::provider
