// Prefill attention: causal, with any cached prefix, tiled after FlashAttention-2 (Dao 2023), in float32.
//
// Per KV head, K is packed as panels [head_dim][panel of keys] and V as panels [keys][panel of dims], so that
// both products are the same register-tiled kernel. The query heads of a KV head are rows of one tile. Tiles of
// keys start at fixed positions: a row's result doesn't depend on how its prompt was cut into chunks.
#include <math.h>

#include <algorithm>
#include <vector>

#include "prefill.h"
#include "simd.h"

namespace {

constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kMicroRows = 6;
constexpr int kRows = 48;   // rows (token, query head) of a tile
constexpr int kKeys = 128;  // keys of a tile; a multiple of kPanel

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// C[kMicroRows][kPanel] (+)= A[kMicroRows][depth] B[depth][kPanel]
template <bool kAccumulate>
inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t depth, float* c, int64_t c_stride) {
  vfloat acc[kMicroRows][kPanelVectors];
  for (int r = 0; r < kMicroRows; r++)
    for (int i = 0; i < kPanelVectors; i++)
      acc[r][i] = kAccumulate ? load(c + r * c_stride + i * kLanes) : (vfloat){};
  for (int64_t k = 0; k < depth; k++) {
    vfloat row[kPanelVectors];
    for (int i = 0; i < kPanelVectors; i++) row[i] = load(b + k * kPanel + i * kLanes);
    for (int r = 0; r < kMicroRows; r++) {
      vfloat x = splat(a[r * a_stride + k]);
      for (int i = 0; i < kPanelVectors; i++) acc[r][i] += x * row[i];
    }
  }
  for (int r = 0; r < kMicroRows; r++)
    for (int i = 0; i < kPanelVectors; i++) store(c + r * c_stride + i * kLanes, acc[r][i]);
}

struct Packed {
  float *k, *v;
  int64_t keys;  // rounded up to kKeys; what lies behind the sequence is zero
  int64_t dims;  // rounded up to kPanel
};

Packed packed_head(const AttentionCall& c, int64_t head, int64_t seq_len) {
  Packed p{nullptr, nullptr, round_up(seq_len, kKeys), round_up(c.head_dim, kPanel)};
  p.k = c.scratch + head * p.keys * (c.head_dim + p.dims);
  p.v = p.k + p.keys * c.head_dim;
  return p;
}

template <class T>
void pack(const AttentionCall& c, const int64_t* table, int64_t head, int64_t seq_len, int64_t first, const Packed& p) {
  for (int64_t panel = first; panel < first + kKeys; panel += kPanel) {
    float* k_panel = p.k + panel * c.head_dim;
    for (int64_t j = 0; j < kPanel; j++) {
      const int64_t key = panel + j;
      if (key >= seq_len) {
        for (int64_t d = 0; d < c.head_dim; d++) k_panel[d * kPanel + j] = 0;
        for (int64_t d = 0; d < p.dims; d += kLanes)
          store(p.v + (d / kPanel * p.keys + key) * kPanel + d % kPanel, (vfloat){});
        continue;
      }
      const T* k = token_row<T>(c, table, key, 0, head);
      const T* v = token_row<T>(c, table, key, 1, head);
      for (int64_t d = 0; d < c.head_dim; d += kLanes) {
        float lanes[kLanes];
        store(lanes, load_upto(k + d, (int)(c.head_dim - d)));
        for (int64_t i = 0; i < kLanes && d + i < c.head_dim; i++) k_panel[(d + i) * kPanel + j] = lanes[i];
      }
      for (int64_t d = 0; d < p.dims; d += kLanes) {
        vfloat x = d < c.head_dim ? load_upto(v + d, (int)(c.head_dim - d)) : (vfloat){};
        store(p.v + (d / kPanel * p.keys + key) * kPanel + d % kPanel, x);
      }
    }
  }
}

struct Tile {
  std::vector<float> q, scores, out, maxima, sums;

  explicit Tile(const AttentionCall& c)
      : q(kRows * c.head_dim), scores(kRows * kKeys), out(kRows * round_up(c.head_dim, kPanel)), maxima(kRows), sums(kRows) {}
};

// Turns a row of scores into weights; `visible` of its keys count.
inline void softmax_row(float* scores, int64_t visible, float& maximum_so_far, float& sum_so_far, float* out,
                        int64_t dims) {
  vfloat top = splat(maximum_so_far);
  for (int64_t j = visible < 0 ? 0 : visible; j < kKeys; j++) scores[j] = -INFINITY;
  for (int64_t j = 0; j < kKeys; j += kLanes) top = maximum(top, load(scores + j));
  const float new_max = largest(top);
  vfloat total = {};
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    vfloat s = load(scores + j);
    vfloat p = s > splat(-INFINITY) ? exponential(s - splat(new_max)) : (vfloat){};
    store(scores + j, p);
    total += p;
  }
  if (new_max > maximum_so_far) {
    const float keep = expf(maximum_so_far - new_max);
    sum_so_far *= keep;
    for (int64_t d = 0; d < dims; d += kLanes) store(out + d, load(out + d) * splat(keep));
  }
  sum_so_far += sum(total);
  maximum_so_far = new_max;
}

template <class Q>
void run_tile(const AttentionCall& c, int64_t head, int64_t first_token, int64_t query_len, int64_t seq_len,
              int64_t first_row, const Packed& p, Tile& tile) {
  const int64_t group = c.q_heads / c.kv_heads, dim = c.head_dim, prefix = seq_len - query_len;
  const int64_t rows = query_len * group - first_row < kRows ? query_len * group - first_row : kRows;
  const int64_t micro_rows = round_up(rows, kMicroRows);
  std::fill(tile.q.begin(), tile.q.end(), 0.0f);
  std::fill(tile.out.begin(), tile.out.end(), 0.0f);
  std::fill(tile.sums.begin(), tile.sums.end(), 0.0f);
  std::fill(tile.maxima.begin(), tile.maxima.end(), -INFINITY);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = (first_row + r) / group, g = (first_row + r) % group;
    const Q* row = (const Q*)c.q + (first_token + token) * c.q_stride + (head * group + g) * dim;
    for (int64_t d = 0; d < dim; d += kLanes) {
      float lanes[kLanes];
      store(lanes, load_upto(row + d, (int)(dim - d)) * splat((float)c.scale));
      memcpy(&tile.q[r * dim + d], lanes, (dim - d < kLanes ? dim - d : kLanes) * sizeof(float));
    }
  }
  const int64_t last_visible = prefix + (first_row + rows - 1) / group + 1;
  for (int64_t key = 0; key < last_visible; key += kKeys) {
    const int64_t keys = last_visible - key < kKeys ? last_visible - key : kKeys;
    for (int64_t panel = 0; panel < keys; panel += kPanel)
      for (int64_t r = 0; r < micro_rows; r += kMicroRows)
        multiply<false>(&tile.q[r * dim], dim, p.k + (key + panel) * dim, dim, &tile.scores[r * kKeys + panel], kKeys);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t visible = prefix + (first_row + r) / group + 1 - key;
      softmax_row(&tile.scores[r * kKeys], visible < keys ? visible : keys, tile.maxima[r], tile.sums[r],
                  &tile.out[r * p.dims], p.dims);
    }
    for (int64_t d = 0; d < p.dims; d += kPanel)
      for (int64_t r = 0; r < micro_rows; r += kMicroRows)
        multiply<true>(&tile.scores[r * kKeys], kKeys, p.v + (d / kPanel * p.keys + key) * kPanel, keys,
                       &tile.out[r * p.dims + d], p.dims);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = (first_row + r) / group, g = (first_row + r) % group;
    Q* out = (Q*)c.out + ((first_token + token) * c.q_heads + head * group + g) * dim;
    const float inverse = 1.0f / tile.sums[r];
    for (int64_t d = 0; d < dim; d++) put(out + d, tile.out[r * p.dims + d] * inverse);
  }
}

template <class T, class Q>
void run(const AttentionCall& c) {
  const int64_t group = c.q_heads / c.kv_heads;
#pragma omp parallel num_threads((int)c.threads)
  {
    Tile tile(c);
    int64_t first_token = 0;
    for (int64_t b = 0; b < c.sequences; b++) {
      const int64_t query_len = c.query_lens[b], seq_len = c.seq_lens[b];
      const int64_t* table = c.page_table + b * c.table_width;
      const int64_t tiles = (query_len * group + kRows - 1) / kRows, key_tiles = (seq_len + kKeys - 1) / kKeys;
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < c.kv_heads * key_tiles; i++) {
        const int64_t head = i / key_tiles;
        pack<T>(c, table, head, seq_len, i % key_tiles * kKeys, packed_head(c, head, seq_len));
      }
      // The last tiles see the most keys: they go first, so that no thread is left with one at the end.
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < c.kv_heads * tiles; i++) {
        const int64_t head = i % c.kv_heads, row = (tiles - 1 - i / c.kv_heads) * kRows;
        run_tile<Q>(c, head, first_token, query_len, seq_len, row, packed_head(c, head, seq_len), tile);
      }
      first_token += query_len;
    }
  }
}

template <class Q>
void run_for_slab(const AttentionCall& c) {
  if (c.slab_type == kFloat32) return run<float, Q>(c);
  if (c.slab_type == kBFloat16) return run<bfloat16, Q>(c);
  run<float16, Q>(c);
}

}  // namespace

// Of either form: which one runs depends on the queries, and those come later.
int64_t prefill_scratch_floats(const AttentionCall& c) {
  int64_t longest = 0;
  for (int64_t b = 0; b < c.sequences; b++) longest = c.seq_lens[b] > longest ? c.seq_lens[b] : longest;
  const int64_t floats = c.kv_heads * round_up(longest, kKeys) * (c.head_dim + round_up(c.head_dim, kPanel));
  return std::max(floats, c.slab_type == kBFloat16 ? prefill_bf16_scratch_floats(c) : 0);
}

void prefill_attention(const AttentionCall& c) {
  if (c.slab_type == kBFloat16 && c.q_type == kBFloat16 && prefill_bf16_available()) return prefill_attention_bf16(c);
  c.q_type == kFloat32 ? run_for_slab<float>(c) : run_for_slab<bfloat16>(c);
}
