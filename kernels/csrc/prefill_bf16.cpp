// Prefill attention with bfloat16 products and float32 sums (AVX512-BF16): causal, with any cached prefix, tiled
// after FlashAttention-2 (Dao 2023).
//
// One dot-product instruction takes pairs of bfloat16. K is packed as panels [pairs of dims][keys], V as panels
// [pairs of keys][dims], each element a pair in one word, so that Q K^T and P V are the same register-tiled
// kernel. The query heads of a KV head are rows of one tile. Tiles of keys start at fixed positions: a row's
// result doesn't depend on how its prompt was cut into chunks.
#include "prefill.h"

#if defined(__AVX512F__) && defined(__AVX512BF16__)

#include <immintrin.h>
#include <math.h>

#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kMicroRows = 6;
constexpr int kRows = 48;             // rows (token, query head) of a tile
constexpr int kKeys = 256;            // keys of a tile
constexpr int kTransposed = kLanes;   // K is packed in squares of so many keys and pairs
constexpr int64_t kRoundKeys = 8192;  // sequences are packed together up to here: bounds the scratch
static_assert(kRows % kMicroRows == 0 && kRows % kLanes == 0 && kKeys % kPanel == 0);

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Two neighbouring bfloat16, the first in the low half.
typedef uint32_t pair;

struct Sequence {
  const int64_t* table;
  int64_t first_token, query_len, seq_len;
  int64_t keys;  // seq_len rounded up to kPanel; what lies behind the sequence is zero
  pair* packed;
};

struct Sizes {
  int64_t pairs;   // of dims, rounded up to kTransposed; those behind head_dim are zero
  int64_t dims;    // rounded up to kPanel
  int64_t of_key;  // words of K and V that one key of one head takes

  explicit Sizes(const AttentionCall& c)
      : pairs(round_up((c.head_dim + 1) / 2, kTransposed)), dims(round_up(c.head_dim, kPanel)), of_key(pairs + dims / 2) {}
};

// C[kMicroRows][kPanel] (+)= A[kMicroRows][depth] B[depth][kPanel], where elements of A and B are pairs.
// Inlined by force: left to GCC, whether it is depends on what else the caller does, and 6% of all time hang on it.
template <bool kAccumulate>
__attribute__((always_inline)) inline void multiply(const pair* a, int64_t a_stride, const pair* b, int64_t depth, float* c, int64_t c_stride) {
  __m512 acc[kMicroRows][kPanelVectors];
  for (int r = 0; r < kMicroRows; r++)
    for (int i = 0; i < kPanelVectors; i++)
      acc[r][i] = kAccumulate ? _mm512_loadu_ps(c + r * c_stride + i * kLanes) : _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    __m512bh row[kPanelVectors];
    for (int i = 0; i < kPanelVectors; i++) row[i] = (__m512bh)_mm512_loadu_si512(b + k * kPanel + i * kLanes);
    for (int r = 0; r < kMicroRows; r++) {
      __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[r * a_stride + k]);
      for (int i = 0; i < kPanelVectors; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], x, row[i]);
    }
  }
  for (int r = 0; r < kMicroRows; r++)
    for (int i = 0; i < kPanelVectors; i++) _mm512_storeu_ps(c + r * c_stride + i * kLanes, acc[r][i]);
}

// Four perfect shuffles of 256 words swap the row and column of each.
inline void transpose(__m512i (&m)[16]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int stage = 0; stage < 4; stage++) {
    __m512i shuffled[16];
    for (int i = 0; i < 8; i++) {
      shuffled[2 * i] = _mm512_permutex2var_epi32(m[i], low, m[i + 8]);
      shuffled[2 * i + 1] = _mm512_permutex2var_epi32(m[i], high, m[i + 8]);
    }
    for (int i = 0; i < 16; i++) m[i] = shuffled[i];
  }
}

// 32 bfloat16 of which the first n count; the others are zero.
inline __m512i load_elements(const bfloat16* p, int64_t n) {
  if (n >= 32) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16(n <= 0 ? 0 : ((__mmask32)1 << n) - 1, p);
}

// Packs a tile of keys of one head, from `first` on.
void pack(const AttentionCall& c, const Sequence& s, int64_t head, int64_t first) {
  const Sizes sizes(c);
  pair *k_panels = s.packed + head * s.keys * sizes.of_key, *v_panels = k_panels + s.keys * sizes.pairs;
  for (int64_t key = first; key < std::min(first + kKeys, s.keys); key += kTransposed) {
    const bfloat16 *k[kTransposed], *v[kTransposed];
    const int64_t keys = std::min<int64_t>(s.seq_len - key, kTransposed);
    for (int64_t j = 0; j < keys; j++) {
      k[j] = token_row<bfloat16>(c, s.table, key + j, 0, head);
      v[j] = token_row<bfloat16>(c, s.table, key + j, 1, head);
    }
    pair* k_panel = k_panels + key / kPanel * kPanel * sizes.pairs + key % kPanel;
    for (int64_t p = 0; p < sizes.pairs; p += kTransposed) {
      __m512i square[kTransposed];
      for (int64_t j = 0; j < kTransposed; j++)
        square[j] = j < keys ? load_elements(k[j] + 2 * p, c.head_dim - 2 * p) : _mm512_setzero_si512();
      transpose(square);
      for (int64_t i = 0; i < kTransposed; i++) _mm512_storeu_si512(k_panel + (p + i) * kPanel, square[i]);
    }
    for (int64_t j = 0; j < kTransposed; j += 2)
      for (int64_t d = 0; d < sizes.dims; d += 2 * kLanes) {
        const __m512i even = j < keys ? load_elements(v[j] + d, c.head_dim - d) : _mm512_setzero_si512();
        const __m512i odd = j + 1 < keys ? load_elements(v[j + 1] + d, c.head_dim - d) : _mm512_setzero_si512();
        pair* to = v_panels + (d / kPanel * s.keys / 2 + (key + j) / 2) * kPanel + d % kPanel;
        for (int half = 0; half < 2; half++) {
          auto widened = [&](__m512i x) {
            return _mm512_cvtepu16_epi32(half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
          };
          _mm512_storeu_si512(to + half * kLanes, _mm512_or_si512(widened(even), _mm512_slli_epi32(widened(odd), 16)));
        }
      }
  }
}

// 2^x for x <= 0, relative error 3e-6: a polynomial for the fraction (fitted to 2^x on [0, 1)), then scaled.
inline __m512 exponential_of_2(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.353417e-2f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.201146e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4144275e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9300384e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0000026f));
  return _mm512_scalef_ps(p, x);
}

// What one thread works on; each array begins on a cache line.
struct Tile {
  struct alignas(kVectorBytes) Line {
    float lanes[kLanes];
  };
  std::vector<Line> lines;
  pair *q, *weights;                     // [kRows][pairs], [kRows][kKeys / 2]
  float *scores, *out, *sums, *maxima;  // [kRows][kKeys], [kRows][dims], [kRows][kLanes], [kRows]

  explicit Tile(const Sizes& sizes)
      : lines(kRows * (sizes.pairs + sizes.dims + kKeys / 2 + kKeys + kLanes + 1) / kLanes),
        q((pair*)lines.data()),
        weights(q + kRows * sizes.pairs),
        scores((float*)(weights + kRows * kKeys / 2)),
        out(scores + kRows * kKeys),
        sums(out + kRows * sizes.dims),
        maxima(sums + kRows * kLanes) {}

  // Weights needn't be cleared for the result, but the tile is 4% faster with their lines in the cache.
  void clear(const Sizes& sizes) {
    std::fill_n(q, kRows * sizes.pairs, 0);
    std::fill_n(weights, kRows * kKeys / 2, 0);
    std::fill_n(out, kRows * sizes.dims, 0.0f);
    std::fill_n(sums, kRows * kLanes, 0.0f);
    std::fill_n(maxima, kRows, -INFINITY);
  }
};

// Turns a row of scores into weights, of which the first `visible` count and the rest up to `keys` are zero.
// `scale` includes the log2(e) that makes e^x a power of two. Sums stay apart by lane until the end.
inline void softmax_row(const float* scores, pair* weights, int64_t visible, int64_t keys, float scale, float& maximum_so_far,
                        float* sums, float* out, int64_t dims) {
  auto mask = [&](int64_t j) {
    return visible - j >= kLanes ? (__mmask16)-1 : (__mmask16)(visible <= j ? 0 : (1 << (visible - j)) - 1);
  };
  __m512 top = _mm512_set1_ps(maximum_so_far);
  for (int64_t j = 0; j < visible; j += kLanes)
    top = _mm512_mask_max_ps(top, mask(j), top, _mm512_loadu_ps(scores + j));
  const float new_max = largest((vfloat)top);
  __m512 total = _mm512_loadu_ps(sums);
  if (new_max > maximum_so_far) {
    const __m512 keep = exponential_of_2(_mm512_set1_ps((maximum_so_far - new_max) * scale));
    total = _mm512_mul_ps(total, keep);
    for (int64_t d = 0; d < dims; d += kLanes)
      _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), keep));
    maximum_so_far = new_max;
  }
  const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(-new_max * scale);
  for (int64_t j = 0; j < keys; j += 2 * kLanes) {
    __m512 half[2];
    for (int i = 0; i < 2; i++) {
      const int64_t at = j + i * kLanes;
      const __m512 x = _mm512_fmadd_ps(_mm512_loadu_ps(scores + at), factor, shift);
      half[i] = _mm512_maskz_mov_ps(mask(at), exponential_of_2(x));
      total = _mm512_add_ps(total, half[i]);
    }
    _mm512_storeu_si512(weights + j / 2, (__m512i)_mm512_cvtne2ps_pbh(half[1], half[0]));
  }
  _mm512_storeu_ps(sums, total);
}

void run_tile(const AttentionCall& c, const Sequence& s, int64_t head, int64_t first_row, Tile& tile) {
  const Sizes sizes(c);
  const int64_t group = c.q_heads / c.kv_heads, dim = c.head_dim, prefix = s.seq_len - s.query_len;
  const int64_t rows = std::min<int64_t>(s.query_len * group - first_row, kRows);
  const int64_t micro_rows = round_up(rows, kMicroRows), depth = (dim + 1) / 2;
  const float scale = (float)(c.scale * M_LOG2E);
  const pair *k_panels = s.packed + head * s.keys * sizes.of_key, *v_panels = k_panels + s.keys * sizes.pairs;
  tile.clear(sizes);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = (first_row + r) / group, g = (first_row + r) % group;
    memcpy(tile.q + r * sizes.pairs, (const bfloat16*)c.q + (s.first_token + token) * c.q_stride + (head * group + g) * dim,
           dim * sizeof(bfloat16));
  }
  const int64_t last_visible = prefix + (first_row + rows - 1) / group + 1;
  for (int64_t key = 0; key < last_visible; key += kKeys) {
    const int64_t keys = std::min<int64_t>(round_up(last_visible - key, 2 * kLanes), kKeys);
    for (int64_t panel = 0; panel < keys; panel += kPanel)
      for (int64_t r = 0; r < micro_rows; r += kMicroRows)
        multiply<false>(tile.q + r * sizes.pairs, sizes.pairs, k_panels + (key + panel) * sizes.pairs, depth,
                        tile.scores + r * kKeys + panel, kKeys);
    for (int64_t r = 0; r < rows; r++) {
      auto softmax = [&](int64_t visible, int64_t of_keys) {
        softmax_row(tile.scores + r * kKeys, tile.weights + r * kKeys / 2, visible, of_keys, scale, tile.maxima[r],
                    tile.sums + r * kLanes, tile.out + r * sizes.dims, sizes.dims);
      };
      const int64_t visible = prefix + (first_row + r) / group + 1 - key;
      visible >= kKeys ? softmax(kKeys, kKeys) : softmax(visible, keys);  // constants: its loops unroll
    }
    for (int64_t d = 0; d < sizes.dims; d += kPanel)
      for (int64_t r = 0; r < micro_rows; r += kMicroRows)
        multiply<true>(tile.weights + r * kKeys / 2, kKeys / 2, v_panels + (d / kPanel * s.keys + key) / 2 * kPanel,
                       keys / 2, tile.out + r * sizes.dims + d, sizes.dims);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = (first_row + r) / group, g = (first_row + r) % group;
    bfloat16* out = (bfloat16*)c.out + ((s.first_token + token) * c.q_heads + head * group + g) * dim;
    const __m512 inverse = _mm512_set1_ps(1.0f / sum(load(tile.sums + r * kLanes)));
    for (int64_t d = 0; d < dim; d += kLanes) {
      const __mmask16 mask = dim - d >= kLanes ? (__mmask16)-1 : (__mmask16)((1 << (dim - d)) - 1);
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(tile.out + r * sizes.dims + d), inverse);
      _mm256_mask_storeu_epi16(out + d, mask, (__m256i)_mm512_cvtneps_pbh(x));
    }
  }
}

// Sequences [first, result) are packed at once.
int64_t end_of_round(const AttentionCall& c, int64_t first) {
  int64_t b = first, keys = 0;
  while (b < c.sequences && (b == first || keys + round_up(c.seq_lens[b], kPanel) <= kRoundKeys))
    keys += round_up(c.seq_lens[b++], kPanel);
  return b;
}

struct Item {
  int64_t sequence, head, at;  // `at`: the first key to pack, or the first row of a tile
  int64_t sees;                // keys
};

}  // namespace

bool prefill_bf16_available() { return true; }

int64_t prefill_bf16_scratch_floats(const AttentionCall& c) {
  int64_t most = 0;
  for (int64_t first = 0; first < c.sequences; first = end_of_round(c, first)) {
    int64_t keys = 0;
    for (int64_t b = first; b < end_of_round(c, first); b++) keys += round_up(c.seq_lens[b], kPanel);
    most = std::max(most, keys);
  }
  return most * c.kv_heads * Sizes(c).of_key;
}

void prefill_attention_bf16(const AttentionCall& c) {
  const Sizes sizes(c);
  const int64_t group = c.q_heads / c.kv_heads;
  int64_t first_token = 0;
  for (int64_t first = 0; first < c.sequences; first = end_of_round(c, first)) {
    std::vector<Sequence> sequences;
    std::vector<Item> to_pack, tiles;
    pair* packed = (pair*)c.scratch;
    for (int64_t b = first; b < end_of_round(c, first); b++) {
      const int64_t index = b - first, rows = c.query_lens[b] * group, prefix = c.seq_lens[b] - c.query_lens[b];
      const int64_t keys = round_up(c.seq_lens[b], kPanel);
      sequences.push_back({c.page_table + b * c.table_width, first_token, c.query_lens[b], c.seq_lens[b], keys, packed});
      for (int64_t h = 0; h < c.kv_heads; h++) {
        for (int64_t key = 0; key < keys; key += kKeys) to_pack.push_back({index, h, key, 0});
        for (int64_t row = 0; row < rows; row += kRows) tiles.push_back({index, h, row, prefix + row / group});
      }
      packed += keys * c.kv_heads * sizes.of_key;
      first_token += c.query_lens[b];
    }
    // Tiles that see the most keys go first, so that no thread is left with one at the end.
    std::stable_sort(tiles.begin(), tiles.end(), [](const Item& a, const Item& b) { return a.sees > b.sees; });
#pragma omp parallel num_threads((int)c.threads)
    {
      Tile tile(sizes);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < to_pack.size(); i++)
        pack(c, sequences[to_pack[i].sequence], to_pack[i].head, to_pack[i].at);
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < tiles.size(); i++)
        run_tile(c, sequences[tiles[i].sequence], tiles[i].head, tiles[i].at, tile);
    }
  }
}

#else

bool prefill_bf16_available() { return false; }
int64_t prefill_bf16_scratch_floats(const AttentionCall&) { return 0; }
void prefill_attention_bf16(const AttentionCall&) {}

#endif
