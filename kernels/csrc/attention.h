// What Python hands over for one layer of one step. Mirrored field by field in kernels/cpu.py.
#pragma once

#include <cstdint>

enum ElementType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct AttentionCall {
  char* slab;  // [pages, layers, 2, kv_heads, page_size, head_dim]
  int64_t slab_type, page_bytes, layer, kv_heads, page_size, head_dim;

  const void* q;  // [tokens, q_heads, head_dim], rows q_stride elements apart
  int64_t q_type, q_stride, q_heads;
  const char *k, *v;  // [tokens, kv_heads, head_dim] in the slab's type, rows k_stride, v_stride elements apart
  int64_t k_stride, v_stride;
  void* out;  // [tokens, q_heads * head_dim] in q's type

  int64_t tokens, sequences;
  const int64_t *query_lens, *seq_lens;           // [sequences]
  const int64_t* page_table;                      // [sequences, table_width]
  int64_t table_width;
  const int64_t *token_pages, *token_offsets;     // [tokens]

  float* scratch;  // at least diptych_scratch_floats() of them
  double scale;
  int64_t threads;
};

inline int64_t element_size(int64_t type) { return type == kFloat32 ? 4 : 2; }

// Where one head's K (which = 0) or V (which = 1) of one page begins.
inline char* head_of_page(const AttentionCall& c, int64_t page, int64_t which, int64_t head) {
  int64_t head_bytes = c.page_size * c.head_dim * element_size(c.slab_type);
  return c.slab + page * c.page_bytes + ((c.layer * 2 + which) * c.kv_heads + head) * head_bytes;
}

template <class T>
inline const T* token_row(const AttentionCall& c, const int64_t* table, int64_t token, int64_t which,
                          int64_t head) {
  const T* rows = (const T*)head_of_page(c, table[token / c.page_size], which, head);
  return rows + (token % c.page_size) * c.head_dim;
}

void decode_attention(const AttentionCall& c);
void prefill_attention(const AttentionCall& c);
int64_t decode_scratch_floats(const AttentionCall& c);
int64_t prefill_scratch_floats(const AttentionCall& c);
