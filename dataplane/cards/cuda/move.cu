// Copies runs of rows from one memory to another and adds up the digest of checksum.py over what it read.
//
// A vector is what one thread loads and stores at once. Vectors are numbered through all rows, in the frame's order; a
// block takes VECTORS_PER_THREAD · blockDim.x neighbouring ones at a time, so that its threads find their runs near each
// other. It includes nothing: NVRTC compiles it on the machine it runs on, and a test compiles it as C++ for the host.

typedef unsigned long long u64;
typedef unsigned int u32;

#define MAX_WARPS 32
#define VECTORS_PER_THREAD 4
#define GOLDEN 0x9E3779B97F4A7C15ULL

template <u32 NUM_WORDS>
struct alignas(8 * NUM_WORDS) Vector {
    u64 words[NUM_WORDS];
};

// One run of rows: where its first row is in the source and in the target, and that row's number among all.
struct Run {
    u64 source;
    u64 target;
    u64 first_row;
};

// What is uploaded before each launch: two zeros and the runs.
struct Table {
    u64 sum;
    u64 num_blocks_done;
    Run runs[1];
};

__device__ inline u64 mix(u64 word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
    return word ^ (word >> 31);
}

// The last run that begins at or before this row: of runs without rows the one behind them.
__device__ inline u32 find_run(const Run* runs, u32 num_runs, u32 row) {
    u32 first = 0, end = num_runs;
    while (end - first > 1) {
        u32 middle = first + (end - first) / 2;
        if (runs[middle].first_row <= row) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return first;
}

// Adds the blocks' sums up; the last block writes the total to the host's memory.
__device__ inline void add_up(u64 sum, Table* table, u64* result) {
    __shared__ u64 sums[MAX_WARPS];
    for (u32 distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(0xFFFFFFFFu, sum, distance);
    }
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 total = 0;
        for (u32 warp = 0; warp < blockDim.x / 32; warp++) {
            total += sums[warp];
        }
        atomicAdd(&table->sum, total);
        __threadfence();
        if (atomicAdd(&table->num_blocks_done, 1ULL) == gridDim.x - 1) {
            *(volatile u64*)result = atomicAdd(&table->sum, 0ULL);
            __threadfence_system();
        }
    }
}

template <u32 NUM_WORDS>
__device__ inline void move_rows(const char* source, char* target, Table* table, u32 num_runs, u32 num_rows,
                                 u32 row_vectors, u64 source_stride, u64 target_stride, u64* result) {
    typedef Vector<NUM_WORDS> V;
    const Run* runs = table->runs;
    const u64 num_vectors = (u64)num_rows * row_vectors;
    const u64 step = (u64)blockDim.x * VECTORS_PER_THREAD;
    u64 sum = 0;
    for (u64 base = blockIdx.x * step; base < num_vectors; base += gridDim.x * step) {
        V loaded[VECTORS_PER_THREAD];
        char* stored_at[VECTORS_PER_THREAD];
        u32 run = num_runs;  // none yet
#pragma unroll
        for (u32 k = 0; k < VECTORS_PER_THREAD; k++) {  // all loads are under way before the first is used
            const u64 index = base + k * blockDim.x + threadIdx.x;
            if (index < num_vectors) {
                const u32 row = (u32)index / row_vectors;
                const u32 column = (u32)index - row * row_vectors;
                if (run == num_runs) {
                    run = find_run(runs, num_runs, row);
                }
                while (run + 1 < num_runs && runs[run + 1].first_row <= row) {
                    run++;
                }
                const u64 row_of_run = row - runs[run].first_row;
                const u64 at = (u64)column * sizeof(V);
                loaded[k] = *(const V*)(source + runs[run].source + row_of_run * source_stride + at);
                stored_at[k] = target + runs[run].target + row_of_run * target_stride + at;
            }
        }
#pragma unroll
        for (u32 k = 0; k < VECTORS_PER_THREAD; k++) {
            const u64 index = base + k * blockDim.x + threadIdx.x;
            if (index < num_vectors) {
                if (target) {
                    *(V*)stored_at[k] = loaded[k];
                }
                if (result) {
#pragma unroll
                    for (u32 word = 0; word < NUM_WORDS; word++) {
                        sum += mix(loaded[k].words[word] ^ ((index * NUM_WORDS + word + 1) * GOLDEN));
                    }
                }
            }
        }
    }
    if (result) {
        add_up(sum, table, result);
    }
}

// No `target`: rows are only digested. No `result`: they are only copied. All parameters have 8 bytes.
#define KERNEL(NAME, NUM_WORDS)                                                                                       \
    extern "C" __global__ void NAME(const char* source, char* target, Table* table, u64 num_runs, u64 num_rows,        \
                                    u64 row_vectors, u64 source_stride, u64 target_stride, u64* result) {              \
        move_rows<NUM_WORDS>(source, target, table, (u32)num_runs, (u32)num_rows, (u32)row_vectors, source_stride,     \
                             target_stride, result);                                                                  \
    }

KERNEL(move_rows_8, 1)
KERNEL(move_rows_16, 2)
