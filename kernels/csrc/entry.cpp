// The C interface that Python calls. No torch headers: it compiles in seconds and outlives torch versions.
#include "attention.h"

#include <cstring>

namespace {

void store_new_tokens(const AttentionCall& c) {
  const int64_t size = element_size(c.slab_type), row = c.head_dim * size;
  for (int64_t n = 0; n < c.tokens; n++) {
    const int64_t page = c.token_pages[n], slot = c.token_offsets[n] * row;
    for (int64_t h = 0; h < c.kv_heads; h++) {
      memcpy(head_of_page(c, page, 0, h) + slot, c.k + n * c.k_stride * size + h * row, row);
      memcpy(head_of_page(c, page, 1, h) + slot, c.v + n * c.v_stride * size + h * row, row);
    }
  }
}

}  // namespace

extern "C" {

int64_t diptych_call_bytes() { return sizeof(AttentionCall); }

int64_t diptych_scratch_floats(const AttentionCall* c, int64_t is_decode) {
  return is_decode ? decode_scratch_floats(*c) : prefill_scratch_floats(*c);
}

void diptych_attend(const AttentionCall* c, int64_t is_decode) {
  store_new_tokens(*c);
  is_decode ? decode_attention(*c) : prefill_attention(*c);
}
}
