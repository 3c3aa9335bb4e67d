/* Kernels for the tokens that decode on a CPU: few rows, all weights. native.py compiles this for the machine it is on.
 *
 * A product of few rows is bound by reading the weights once, and the forty small operations of a layer cost as much
 * again when each is a call into torch. Here a layer is four calls: two norms, attention, the gated MLP.
 *
 * float32 weights are in oneDNN's packed layout, [outputs / 64][depth][64], so that long prompts (through torch) and
 * decoding read the same memory; native.py checks that they lie so. int8 weights, [outputs / 64][depth][64][4], take the
 * same way through the caches, four inputs at a time (quantize.py says what is computed). The sum of an output runs
 * over its inputs in order whatever the number of rows: a row is the same to the last bit in every batch.
 */

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define PANEL 64 /* outputs that lie together */
#define STRIP 32 /* outputs that are summed at a time, and the unit in which threads share a layer */
#define DEPTH 64 /* inputs of a panel that stay in the first cache while all rows pass */
#define GROUP 3  /* most rows whose sums stay in registers */
#define LANES 8
#define QUERIES 24 /* rows of a tile of scores, about */
#define MANY_ROWS 32 /* more are worth waking threads for small work */
#define LINE 16 /* floats of a line of a cache */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t whole_alias __attribute__((may_alias));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef struct {
    const float *weight, *bias;     /* bias: NULL without */
    int64_t inputs, outputs, depth; /* depth: of the layout, at least `inputs`; of int8, a fourth of that */
    const float *scales;            /* of int8: [outputs]; NULL for float32 */
    const int32_t *totals;          /* of int8: [outputs], 128 times the sum of an output's weights */
    int64_t rotated;                /* of int8: inputs that are rotated together, a power of two up to 64 */
} Linear;

typedef struct {
    Linear qkv, out;
    const float *q_norm, *k_norm;          /* NULL without */
    int64_t together;                      /* norms over all heads of a token instead of each */
    int64_t heads, kv_heads, dim, rotated; /* rotated: dimensions of a head that turn, 0 for none */
    float q_eps, k_eps, scale;
} Attention;

typedef struct {
    Linear gate_up, down;
} Mlp;

typedef struct {
    int64_t rows, width, block, threads;
    const int64_t *tables;         /* [rows, width] pages */
    const int64_t *ends;           /* [rows] tokens, the new one included */
    const float *cosines, *sines;  /* [rows, rotated]; the first half of the sines is negated */
    float *scratch;                /* for sums between products, and [threads, room] of scores */
    int64_t room;
} Step;

/* A chunk of a prompt. */
typedef struct {
    const int64_t *pages;
    int64_t start, count, block, heads, kv_heads, dim, tiles, threads; /* tiles: of PANEL tokens, up to the chunk's end */
    float scale;
} Prompt;

INLINE lanes spread(float x) { return x - (lanes){0}; }

INLINE lanes choose(whole mask, lanes yes, lanes no) { return (lanes)((mask & (whole)yes) | (~mask & (whole)no)); }

INLINE float total(lanes x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE lanes exponential(lanes x) { /* e^x for x <= 0, to 2 units in the last place; NaN stays */
    x = choose(x < -87.0f, spread(-87.0f), x);
    lanes shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer in the low bits */
    lanes n = shifted - 12582912.0f;
    lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    whole power = (whole)shifted << 23;
    return (lanes)((whole)p + power);
}

/* sums[R, PANEL] += x[R, depth] times w[depth, V * LANES]; a line of what comes next is asked for at each step. */
#define MULTIPLY(R, V)                                                                                                 \
    static void multiply_##R(const float *x, int64_t stride, const float *w, int64_t depth, float *sums,              \
                             const float *ahead) {                                                                     \
        lanes sum[R][V];                                                                                               \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) sum[r][v] =                              \
            *(const lanes *)(sums + r * PANEL + v * LANES);                                                            \
        for (int64_t k = 0; k < depth; k++) {                                                                          \
            lanes weight[V];                                                                                           \
            UNROLL for (int v = 0; v < V; v++) weight[v] = *(const lanes *)(w + k * PANEL + v * LANES);                \
            __builtin_prefetch(ahead + k * LINE, 0, 2);                                                                  \
            UNROLL for (int r = 0; r < R; r++) {                                                                       \
                lanes value = spread(x[r * stride + k]);                                                               \
                UNROLL for (int v = 0; v < V; v++) sum[r][v] += value * weight[v];                                     \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) *(lanes *)(sums + r * PANEL + v * LANES) \
            = sum[r][v];                                                                                               \
    }
MULTIPLY(1, 4)
MULTIPLY(2, 4)
MULTIPLY(3, 4)

#ifdef __AVX2__
/* The same in integers: x is four unsigned bytes, w four signed ones, two of which never add up to more than 128. */
#define MULTIPLY_BYTES(R, V)                                                                                           \
    static void multiply_bytes_##R(const float *x, int64_t stride, const float *w, int64_t depth, float *sums,        \
                                   const float *ahead) {                                                               \
        const __m256i ones = _mm256_set1_epi16(1);                                                                     \
        __m256i sum[R][V];                                                                                             \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++) sum[r][v] =                              \
            _mm256_loadu_si256((const __m256i *)(sums + r * PANEL + v * LANES));                                       \
        for (int64_t k = 0; k < depth; k++) {                                                                          \
            __builtin_prefetch(ahead + k * LINE, 0, 2);                                                                \
            __m256i value[R];                                                                                          \
            UNROLL for (int r = 0; r < R; r++) value[r] = _mm256_set1_epi32(((const whole_alias *)x)[r * stride + k]); \
            UNROLL for (int v = 0; v < V; v++) {                                                                       \
                __m256i weight = _mm256_loadu_si256((const __m256i *)(w + k * PANEL + v * LANES));                     \
                UNROLL for (int r = 0; r < R; r++) sum[r][v] = _mm256_add_epi32(                                       \
                    sum[r][v], _mm256_madd_epi16(_mm256_maddubs_epi16(value[r], weight), ones));                       \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)                                          \
            _mm256_storeu_si256((__m256i *)(sums + r * PANEL + v * LANES), sum[r][v]);                                 \
    }
MULTIPLY_BYTES(1, 4)
MULTIPLY_BYTES(2, 4)
MULTIPLY_BYTES(3, 4)
#endif

static void multiply(int bytes, int64_t rows, const float *x, int64_t stride, const float *w, int64_t depth, float *sums,
                     const float *ahead) {
#ifdef __AVX2__
    if (bytes) {
        switch (rows) {
            case 1: multiply_bytes_1(x, stride, w, depth, sums, ahead); return;
            case 2: multiply_bytes_2(x, stride, w, depth, sums, ahead); return;
            case 3: multiply_bytes_3(x, stride, w, depth, sums, ahead); return;
        }
    }
#endif
    switch (rows) {
        case 1: multiply_1(x, stride, w, depth, sums, ahead); return;
        case 2: multiply_2(x, stride, w, depth, sums, ahead); return;
        case 3: multiply_3(x, stride, w, depth, sums, ahead); return;
    }
}

/* sums[rows, PANEL] += x[rows, depth] times a panel's outputs from..to, whose next inputs are fetched meanwhile. */
static void multiply_block(int bytes, int64_t rows, const float *x, int64_t stride, const float *w, int64_t depth,
                           int64_t from, int64_t to, float *sums) {
    int64_t groups = (rows + GROUP - 1) / GROUP, part = 0;
    for (int64_t g = 0; g < groups; g++) {
        int64_t r = rows * g / groups, count = rows * (g + 1) / groups - r;
        for (int64_t at = from; at < to; at += STRIP) {
            const float *ahead = w + (DEPTH + part++ * DEPTH * LINE / PANEL % DEPTH) * PANEL;
            multiply(bytes, count, x + r * stride, stride, w + at, depth, sums + r * PANEL + at, ahead);
        }
    }
}

/* x[size] times the Hadamard matrix of `size`, a power of two, over its root. */
static void turn(float *x, int64_t size) {
    int64_t step = 1;
    if (size >= LANES) {
        const lanes signs[3] = {{1, -1, 1, -1, 1, -1, 1, -1}, {1, 1, -1, -1, 1, 1, -1, -1}, {1, 1, 1, 1, -1, -1, -1, -1}};
        const whole partners[3] = {{1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5}, {4, 5, 6, 7, 0, 1, 2, 3}};
        for (int64_t i = 0; i < size; i += LANES) {
            lanes part = *(lanes *)(x + i);
            UNROLL for (int s = 0; s < 3; s++) part = part * signs[s] + __builtin_shuffle(part, partners[s]);
            *(lanes *)(x + i) = part;
        }
        step = LANES;
    }
    for (; step < size; step *= 2)
        for (int64_t i = 0; i < size; i += 2 * step)
            for (int64_t j = i; j < i + step; j++) {
                float low = x[j], high = x[j + step];
                x[j] = low + high;
                x[j + step] = low - high;
            }
    float root = 1.0f / sqrtf((float)size);
    for (int64_t i = 0; i < size; i++) x[i] *= root;
}

/* x[inputs] rotated, as bytes 1..255 around 128, zeros behind them; gives what a level stands for. */
static float quantize(const Linear *layer, const float *x, uint8_t *bytes) {
    float rotated[layer->inputs] __attribute__((aligned(64)));
    float most = 1e-30f;
    memcpy(rotated, x, sizeof rotated);
    for (int64_t i = 0; i < layer->inputs; i += layer->rotated) turn(rotated + i, layer->rotated);
    for (int64_t i = 0; i < layer->inputs; i++) most = fabsf(rotated[i]) > most ? fabsf(rotated[i]) : most;
    for (int64_t i = 0; i < layer->inputs; i++)
        bytes[i] = (uint8_t)(int32_t)(rintf(rotated[i] / most * 127.0f) + 128.0f);
    memset(bytes + layer->inputs, 128, 4 * layer->depth - layer->inputs);
    return most / 127.0f;
}

/* This thread's share of x[rows, inputs] times a linear layer; out[rows, outputs]. Within a parallel region, whose
 * threads share `room` for inputs in bytes: rows * (inputs / 4 + 2) floats. */
static void product(const Linear *layer, const float *x, float *out, int64_t rows, float *room) {
    int64_t outputs = layer->outputs, depth = layer->inputs, stride = layer->inputs;
    int64_t strips = (outputs + STRIP - 1) / STRIP, me = omp_get_thread_num(), all = omp_get_num_threads();
    int64_t first = strips * me / all * STRIP, end = strips * (me + 1) / all * STRIP;
    float sums[rows * PANEL] __attribute__((aligned(64)));
    int bytes = layer->scales != NULL;
    if (bytes) {
        float *levels = room + rows;
        depth = stride = layer->depth;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            room[r] = quantize(layer, x + r * layer->inputs, (uint8_t *)(levels + r * stride));
        x = levels;
    }
    for (int64_t panel = first / PANEL * PANEL; panel < end; panel += PANEL) {
        int64_t from = first > panel ? first - panel : 0, to = end - panel < PANEL ? end - panel : PANEL;
        const float *w = layer->weight + panel * layer->depth;
        memset(sums, 0, sizeof sums);
        for (int64_t k = 0; k < depth; k += DEPTH)
            multiply_block(bytes, rows, x + k, stride, w + k * PANEL, depth - k < DEPTH ? depth - k : DEPTH, from, to, sums);
        to = outputs - panel < to ? outputs - panel : to;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = from, o = panel + from; i < to; i++, o++) {
                float sum = sums[r * PANEL + i];
                if (bytes) sum = (float)(((const whole_alias *)sums)[r * PANEL + i] - layer->totals[o]) * (layer->scales[o] * room[r]);
                out[r * outputs + o] = sum + (layer->bias ? layer->bias[o] : 0.0f);
            }
    }
#pragma omp barrier
}

static void normalize(const float *x, const float *weight, float *out, int64_t width, float eps) {
    lanes squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        lanes part = *(const lanes *)(x + i);
        squares += part * part;
    }
    for (; i < width; i++) rest += x[i] * x[i];
    float factor = 1.0f / sqrtf((total(squares) + rest) / (float)width + eps);
    for (i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}

static void normalize_heads(float *heads, const float *weight, int64_t count, int64_t dim, int64_t together, float eps) {
    if (together)
        normalize(heads, weight, heads, count * dim, eps);
    else
        for (int64_t h = 0; h < count; h++) normalize(heads + h * dim, weight, heads + h * dim, dim, eps);
}

static void rotate(float *head, const float *cosine, const float *sine, int64_t rotated) {
    int64_t half = rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] + high * sine[i];
        head[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

/* Norms and positions of one row's queries and keys; its K and V go to their page. */
static void place(const Attention *a, const Step *step, float *qkv, float *cache, int64_t row) {
    int64_t kv = a->kv_heads * a->dim, at = step->ends[row] - 1;
    float *keys = qkv + a->heads * a->dim;
    if (a->q_norm) normalize_heads(qkv, a->q_norm, a->heads, a->dim, a->together, a->q_eps);
    if (a->k_norm) normalize_heads(keys, a->k_norm, a->kv_heads, a->dim, a->together, a->k_eps);
    if (a->rotated)
        for (int64_t h = 0; h < a->heads + a->kv_heads; h++)
            rotate(qkv + h * a->dim, step->cosines + row * a->rotated, step->sines + row * a->rotated, a->rotated);
    float *page = cache + step->tables[row * step->width + at / step->block] * 2 * step->block * kv;
    for (int64_t i = 0; i < kv; i++) {
        page[at % step->block * kv + i] = keys[i];
        page[(step->block + at % step->block) * kv + i] = keys[kv + i];
    }
}

/* One query head over its context; `scores` has room for it. */
static void attend(const Attention *a, const Step *step, const float *query, const float *cache, int64_t row,
                   int64_t kv_head, float *scores, float *out) {
    int64_t kv = a->kv_heads * a->dim, dim = a->dim, block = step->block, end = step->ends[row];
    const int64_t *table = step->tables + row * step->width;
    float most = -INFINITY;
    for (int64_t first = 0; first < end; first += block) {
        const float *keys = cache + table[first / block] * 2 * block * kv + kv_head * dim;
        for (int64_t t = first; t < end && t < first + block; t++, keys += kv) {
            lanes low = {0}, high = {0};
            int64_t i = 0;
            for (; i + 2 * LANES <= dim; i += 2 * LANES) {
                low += *(const lanes *)(query + i) * *(const lanes *)(keys + i);
                high += *(const lanes *)(query + i + LANES) * *(const lanes *)(keys + i + LANES);
            }
            if (i < dim) low += *(const lanes *)(query + i) * *(const lanes *)(keys + i);
            scores[t] = total(low + high) * a->scale;
            most = scores[t] > most ? scores[t] : most;
        }
    }
    for (int64_t t = end; t % LANES; t++) scores[t] = -INFINITY;
    lanes sum = {0};
    for (int64_t t = 0; t < end; t += LANES) {
        lanes part = exponential(*(const lanes *)(scores + t) - most);
        *(lanes *)(scores + t) = part;
        for (int i = 0; i < LANES; i++) sum[i] += t + i < end ? part[i] : 0.0f;
    }
    float share = 1.0f / total(sum);
    for (int64_t d = 0; d < dim; d += 4 * LANES) {
        int64_t vectors = (dim - d) / LANES < 4 ? (dim - d) / LANES : 4;
        lanes mixed[4] = {{0}};
        for (int64_t first = 0; first < end; first += block) {
            const float *values = cache + (table[first / block] * 2 + 1) * block * kv + kv_head * dim + d;
            for (int64_t t = first; t < end && t < first + block; t++, values += kv) {
                if (vectors == 4)
                    UNROLL for (int v = 0; v < 4; v++) mixed[v] += scores[t] * *(const lanes *)(values + v * LANES);
                else
                    for (int v = 0; v < vectors; v++) mixed[v] += scores[t] * *(const lanes *)(values + v * LANES);
            }
        }
        for (int v = 0; v < vectors; v++) *(lanes *)(out + d + v * LANES) = mixed[v] * share;
    }
}


/* All rows, one query head at a time. Within a parallel region. */
static void attend_all(const Attention *a, const Step *step, const float *qkv, const float *cache, float *scores,
                       float *out) {
    int64_t heads = a->heads, all = heads + 2 * a->kv_heads;
    float *own = scores + omp_get_thread_num() * step->room;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < step->rows * heads; i++) {
        int64_t row = i / heads, head = i % heads;
        attend(a, step, qkv + (row * all + head) * a->dim, cache, row, head / (heads / a->kv_heads), own,
               out + i * a->dim);
    }
}

/* A tile of keys and values: keys[dim][PANEL] turned, values[dim / PANEL][PANEL][PANEL], zeros behind the end. */
static void pack_tile(const Prompt *p, const float *cache, int64_t kv_head, int64_t tile, float *keys, float *values) {
    int64_t dim = p->dim, kv = p->kv_heads * dim, end = p->start + p->count;
    for (int64_t i = 0; i < PANEL; i++) {
        int64_t at = tile * PANEL + i;
        const float *page = cache + (at < end ? p->pages[at / p->block] : 0) * 2 * p->block * kv;
        const float *key = page + at % p->block * kv + kv_head * dim, *value = key + p->block * kv;
        for (int64_t d = 0; d < dim; d++) {
            keys[d * PANEL + i] = at < end ? key[d] : 0.0f;
            values[(d / PANEL * PANEL + i) * PANEL + d % PANEL] = at < end ? value[d] : 0.0f;
        }
    }
}

/* Scores of a tile become shares of the largest so far; what was summed before is brought down to it. */
static void soften(float *scores, int64_t seen, float *most, float *sum, float *mixed, int64_t rows, int64_t panels) {
    for (int64_t i = seen > 0 ? seen : 0; i < PANEL; i++) scores[i] = -INFINITY;
    float top = *most;
    for (int64_t i = 0; i < PANEL; i++) top = scores[i] > top ? scores[i] : top;
    lanes shares = {0};
    for (int64_t i = 0; i < PANEL; i += LANES) {
        lanes part = exponential(*(const lanes *)(scores + i) - top);
        *(lanes *)(scores + i) = part;
        shares += part;
    }
    float kept = exponential(spread(*most - top))[0];
    *sum = *sum * kept + total(shares);
    *most = top;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t i = 0; i < PANEL; i++) mixed[panel * rows * PANEL + i] *= kept;
}

/* Causal attention of `tokens` tokens from `first` on, for the query heads of one KV head. */
static void attend_tokens(const Prompt *p, const float *qkv, const float *packed, int64_t kv_head, int64_t first,
                          int64_t tokens, float *out) {
    int64_t dim = p->dim, panels = dim / PANEL, group = p->heads / p->kv_heads, rows = tokens * group;
    int64_t last = (p->start + first + tokens - 1) / PANEL, tile_floats = 2 * PANEL * dim;
    float query[rows * dim], scores[rows * PANEL], mixed[rows * dim], most[rows], sum[rows];
    for (int64_t r = 0; r < rows; r++) {
        const float *head = qkv + ((first + r / group) * (p->heads + 2 * p->kv_heads) + kv_head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d++) query[r * dim + d] = head[d] * p->scale;
        most[r] = -INFINITY, sum[r] = 0;
    }
    memset(mixed, 0, sizeof mixed);
    for (int64_t tile = 0; tile <= last; tile++) {
        const float *keys = packed + (kv_head * p->tiles + tile) * tile_floats, *values = keys + PANEL * dim;
        memset(scores, 0, sizeof scores);
        for (int64_t d = 0; d < dim; d += DEPTH)
            multiply_block(0, rows, query + d, dim, keys + d * PANEL, DEPTH, 0, PANEL, scores);
        for (int64_t r = 0; r < rows; r++)
            soften(scores + r * PANEL, p->start + first + r / group + 1 - tile * PANEL, most + r, sum + r,
                   mixed + r * PANEL, rows, panels);
        for (int64_t panel = 0; panel < panels; panel++)
            multiply_block(0, rows, scores, PANEL, values + panel * PANEL * PANEL, PANEL, 0, PANEL,
                           mixed + panel * rows * PANEL);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d++)
            out[((first + r / group) * p->heads + kv_head * group + r % group) * dim + d] =
                mixed[(d / PANEL * rows + r) * PANEL + d % PANEL] / sum[r];
}

/* A chunk of a prompt over its pages, its own K and V among them. qkv[count, heads + 2 kv_heads, dim] with positions,
 * out[count, heads, dim]; dim is a multiple of PANEL. `packed`: kv_heads * tiles * 2 * PANEL * dim floats. */
void moonpool_prefill(const Prompt *p, const float *qkv, const float *cache, float *packed, float *out) {
    int64_t group = p->heads / p->kv_heads, tokens = group < QUERIES ? QUERIES / group : 1;
    int64_t parts = (p->count + tokens - 1) / tokens, tile_floats = 2 * PANEL * p->dim;
#pragma omp parallel num_threads(p->threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p->kv_heads * p->tiles; i++)
            pack_tile(p, cache, i / p->tiles, i % p->tiles, packed + i * tile_floats,
                      packed + i * tile_floats + PANEL * p->dim);
#pragma omp for schedule(dynamic)
        for (int64_t i = p->kv_heads * parts - 1; i >= 0; i--) { /* the longest first */
            int64_t first = i / p->kv_heads * tokens, left = p->count - first;
            attend_tokens(p, qkv, packed, i % p->kv_heads, first, left < tokens ? left : tokens, out);
        }
    }
}

void moonpool_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width, float eps,
                   int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > MANY_ROWS)
    for (int64_t r = 0; r < rows; r++) normalize(x + r * width, weight, out + r * width, width, eps);
}

/* The first `heads` of a token's `all` heads, in place. */
void moonpool_rotate(float *x, const float *cosines, const float *sines, int64_t rows, int64_t heads, int64_t all,
                     int64_t dim, int64_t rotated, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > MANY_ROWS)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            rotate(x + (r * all + h) * dim, cosines + r * rotated, sines + r * rotated, rotated);
}

/* out[width] = silu(x[..width]) * x[width..] */
static void activate(const float *x, float *out, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        lanes gate = *(const lanes *)(x + i), up = *(const lanes *)(x + width + i);
        lanes small = exponential(choose(gate < 0.0f, gate, -gate)); /* e^-|gate| */
        *(lanes *)(out + i) = gate * choose(gate < 0.0f, small, spread(1.0f)) / (small + 1.0f) * up;
    }
}

void moonpool_activate(const float *x, float *out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > MANY_ROWS)
    for (int64_t r = 0; r < rows; r++) activate(x + r * 2 * width, out + r * width, width);
}

void moonpool_linear(const Linear *layer, const float *x, float *out, float *room, int64_t rows, int64_t threads) {
#pragma omp parallel num_threads(threads)
    product(layer, x, out, rows, room);
}

void moonpool_mlp(const Mlp *mlp, const float *x, float *out, float *scratch, int64_t rows, int64_t threads) {
    int64_t width = mlp->down.inputs;
    float *activated = scratch + rows * 2 * width, *room = activated + rows * width;
#pragma omp parallel num_threads(threads)
    {
        product(&mlp->gate_up, x, scratch, rows, room);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) activate(scratch + r * 2 * width, activated + r * width, width);
        product(&mlp->down, activated, out, rows, room);
    }
}

/* qkv[rows, heads + 2 kv_heads, dim], rotated already: for batches of which only some rows decode. */
void moonpool_attend(const Attention *a, const Step *step, const float *qkv, const float *cache, float *out) {
#pragma omp parallel num_threads(step->threads)
    attend_all(a, step, qkv, cache, step->scratch, out);
}

void moonpool_attention(const Attention *a, const Step *step, const float *x, float *cache, float *out) {
    int64_t rows = step->rows;
    float *qkv = step->scratch, *mixed = qkv + rows * a->qkv.outputs, *scores = mixed + rows * a->out.inputs;
    float *room = scores + step->threads * step->room;
#pragma omp parallel num_threads(step->threads)
    {
        product(&a->qkv, x, qkv, rows, room);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) place(a, step, qkv + row * a->qkv.outputs, cache, row);
        attend_all(a, step, qkv, cache, scores, mixed);
        product(&a->out, mixed, out, rows, room);
    }
}

/* Whether int8 weights can be multiplied here. */
int moonpool_int8(void) {
#ifdef __AVX2__
    return 1;
#else
    return 0;
#endif
}
