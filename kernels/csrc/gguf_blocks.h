// Reads one block of 32 weights of a GGUF row, whatever its type, in the two forms that are packed.
#pragma once
#include "common.h"

namespace fp {

// 32 weights of 4 bits: w = scale * q + min. Word t holds inputs 4 t .. 4 t + 3, one nibble in each byte.
struct NibbleBlock {
    uint32_t words[8];
    float scale;
    float min;
};

// 32 signed weights of at most 8 bits: w = scale[i / 16] * q[i].
struct ByteBlock {
    int8_t q[32];
    float scale[2];
};

NibbleBlock read_nibbles(int type, const uint8_t* row, int block);
ByteBlock read_bytes(int type, const uint8_t* row, int block);

}  // namespace fp
