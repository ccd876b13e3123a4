// The two forms of prefill attention: float32 products on any machine, bfloat16 products where it has them.
#pragma once

#include "attention.h"

// Whether this library was compiled for a machine that multiplies bfloat16.
bool prefill_bf16_available();
void prefill_attention_bf16(const AttentionCall& c);  // q and slab are both bfloat16
int64_t prefill_bf16_scratch_floats(const AttentionCall& c);
