/* Convolution of 3x3 with stride 1 by Winograd's algorithm F(4x4, 3x3): a quarter of the
   multiplications. Lavin and Gray, "Fast algorithms for convolutional neural networks", 2015.

   One of Tx3x3 over frames is a sum of T such convolutions over shifted frames. Its products are
   those of T times as many input channels, so tiles of T frames lie side by side in one row.

   One of 3x1x1 over time is F(4, 3) of each pixel: a tile is four frames of it, read as six, and has
   half of the multiplications.

   Images are rows of channels (channels last). Each tile of 4x4 outputs is read as 6x6 inputs and
   transformed to 36 numbers a channel; these are multiplied with the transformed weights, one
   matrix product for each of the 36, and transformed back. All of it is float32, whatever the dtype
   of the images. Weights are transformed in every call, a block of output channels at a time, so
   that nothing is stored between calls; that costs as much as the products of some forty tiles.

   Beyond the edge are zeros, or pixels and frames of this side of it; before the first frame are
   those of an earlier piece of the video, if there is one. So a caller needs no padded copy.

   A tile's result depends on its own numbers alone: neither the number of threads nor the batch
   changes a bit. A value that is not finite reaches all of its tile. */

#include "product.h"

enum { OUT = 4, SIDE = 6, AREA = SIDE * SIDE };

enum { ZEROS, REPLICATE, REFLECT };

/* What a piece of work holds, by trial: transformed weights of 4 MB, or of 128 output channels where
   that is more, and transformed tiles of 0.8 MB, more where the weights don't stay in the cache. */
enum {
  MOST_WEIGHTS = 1 << 20,
  LEAST_PANELS = 128 / PANEL,
  MOST_NUMBERS = 3 << 16,
  FEW_TILES = 28 / ROWS * ROWS,
  MANY_TILES = 112 / ROWS * ROWS,
};

typedef struct {
  const void *x, *weight;
  const float *bias;
  void *y;
  long height, width, outputs;     /* of an output image, and its channels */
  long from_height, from_width, channels; /* of an input image */
  long frames, from_frames, taps;  /* of a sample: output, input; input frames of an output frame */
  long front, pad;                 /* frames before the first, pixels around each */
  const void *history;             /* the last of the frames before the first */
  long earlier;                    /* how many those are */
  int repeats_frames;              /* whether others repeat the first or last one, or are zeros */
  int pixels;                      /* what lies around a frame: one of those below */
  long inputs;                     /* channels of all taps */
  long rows, columns, tiles;       /* tiles of an image (over time: of frames, of pixels), all */
  long stride_out, stride_in, stride_t, stride_y, stride_x; /* of the weight */
} Convolution;

/* The polynomials' points are 0, +-A, +-B and infinity: 1 and 2 are usual, and these have less than
   half of their error. All constants of the tiles' transformations are exact. */
#define A 0.6875f
#define B 1.5f
#define A2 (A * A)
#define B2 (B * B)

/* B^T d of one column or row of a tile. */
INLINE void transform_input(const floats *d, floats *to, long step) {
  floats a = d[4] - B2 * d[2], b = A * (d[3] - B2 * d[1]);
  floats c = d[4] - A2 * d[2], e = B * (d[3] - A2 * d[1]);
  to[0] = d[4] + (A2 * B2 * d[0] - (A2 + B2) * d[2]);
  to[step] = a + b;
  to[2 * step] = a - b;
  to[3 * step] = c + e;
  to[4 * step] = c - e;
  to[5 * step] = d[5] + (A2 * B2 * d[1] - (A2 + B2) * d[3]);
}

/* A^T m of one column or row. */
INLINE void transform_output(const floats *m, floats *to, long step) {
  floats a = m[1] + m[2], b = A * (m[1] - m[2]), c = m[3] + m[4], d = B * (m[3] - m[4]);
  to[0] = m[0] + a + c;
  to[step] = b + d;
  to[2 * step] = A2 * a + B2 * c;
  to[3 * step] = A2 * b + B2 * d + m[5];
}

/* G g of one column or row. */
INLINE void transform_weight(const floats *g, long step, floats *to, long to_step) {
  const float a = 1 / (2 * A2 * (A2 - B2)), b = 1 / (2 * B2 * (B2 - A2));
  floats c = a * (g[0] + A2 * g[2 * step]), d = a * A * g[step];
  floats e = b * (g[0] + B2 * g[2 * step]), f = b * B * g[step];
  to[0] = (1 / (A2 * B2)) * g[0];
  to[to_step] = c + d;
  to[2 * to_step] = c - d;
  to[3 * to_step] = e + f;
  to[4 * to_step] = e - f;
  to[5 * to_step] = g[2 * step];
}

/* One tap of LANES output channels from `out` on, and of one input channel. */
INLINE floats read_tap(const Convolution *job, long out, long in, long t, long y, long x,
                       int is_bf16) {
  float values[LANES] = {0};
  long from = out * job->stride_out + in * job->stride_in + t * job->stride_t + y * job->stride_y +
              x * job->stride_x;
  for (long lane = 0; lane < smaller(job->outputs - out, LANES); lane++)
    values[lane] = get(job->weight, from + lane * job->stride_out, is_bf16);
  return load_lanes(values, 0);
}

/* Weights of one panel of output channels and one input channel: LANES of each, `plane` apart. */
INLINE void weight_panel(const Convolution *job, long out, long in, float *to, long plane,
                         int is_over_time, int is_bf16) {
  for (int part = 0; part < COLUMNS; part++, out += LANES, to += LANES) {
    floats g[9], half[SIDE * 3], whole[AREA];
    if (is_over_time) {
      for (int t = 0; t < 3; t++) g[t] = read_tap(job, out, in, t, 0, 0, is_bf16);
      transform_weight(g, 1, whole, 1);
    } else {
      for (int tap = 0; tap < 9; tap++)
        g[tap] = read_tap(job, out, in % job->channels, in / job->channels, tap / 3, tap % 3,
                          is_bf16);
      for (int j = 0; j < 3; j++) transform_weight(g + j, 3, half + j, 3);
      for (int i = 0; i < SIDE; i++) transform_weight(half + i * 3, 1, whole + i * SIDE, 1);
    }
    for (int f = 0; f < (is_over_time ? SIDE : AREA); f++)
      memcpy(to + f * plane, &whole[f], sizeof whole[f]);
  }
}

INLINE long clamp(long value, long size) {
  return value < 0 ? 0 : value < size ? value : size - 1;
}

/* A frame of a sample, before the first and after the last too; NULL is one of zeros. */
INLINE const void *find_frame(const Convolution *job, long sample, long frame, int is_bf16) {
  long size = job->from_height * job->from_width * job->channels, before = job->earlier + frame;
  if (frame < 0 && before >= 0)
    return at(job->history, (sample * job->earlier + before) * size, is_bf16);
  if (job->repeats_frames) frame = clamp(frame, job->from_frames);
  if (frame < 0 || frame >= job->from_frames) return NULL;
  return at(job->x, (sample * job->from_frames + frame) * size, is_bf16);
}

/* The row or column that is read there; tiles reach further than the padding. */
INLINE long find_pixel(const Convolution *job, long at, long size) {
  if (job->pixels == ZEROS) return at;
  if (job->pixels == REFLECT) at = at < 0 ? -at : at < size ? at : 2 * size - 2 - at;
  return clamp(at, size);
}

/* The transformed inputs of one tile of one frame: a row of channels, `plane` apart. */
INLINE void read_frame(const Convolution *job, const void *frame, long top, long left, float *to,
                       long plane, int is_bf16) {
  static const float nothing[LANES];
  const char *pixel[AREA];
  long step[AREA]; /* bytes a channel: none beyond the edge */
  for (int i = 0; i < AREA; i++) {
    long y = find_pixel(job, top + i / SIDE, job->from_height);
    long x = find_pixel(job, left + i % SIDE, job->from_width);
    int is_in = frame && y >= 0 && y < job->from_height && x >= 0 && x < job->from_width;
    long place = (y * job->from_width + x) * job->channels;
    pixel[i] = is_in ? at(frame, place, is_bf16) : (const char *)nothing;
    step[i] = is_in ? (is_bf16 ? 2 : 4) : 0;
  }
  for (long c = 0; c < job->channels; c += LANES) {
    floats half[AREA], whole[AREA];
    for (int j = 0; j < SIDE; j++) {
      floats d[SIDE];
      for (int i = 0; i < SIDE; i++)
        d[i] = load(pixel[i * SIDE + j] + c * step[i * SIDE + j], 0, job->channels - c, is_bf16);
      transform_input(d, half + j, SIDE);
    }
    for (int i = 0; i < SIDE; i++) transform_input(half + i * SIDE, whole + i * SIDE, 1);
    for (int f = 0; f < AREA; f++) memcpy(to + f * plane + c, &whole[f], sizeof whole[f]);
  }
}

/* The same of all frames that an output tile needs. In order: each overwrites the lanes that the
   one before it left over. */
INLINE void read_tile(const Convolution *job, long tile, float *to, long plane, int is_bf16) {
  long image = tile / (job->rows * job->columns), at_tile = tile % (job->rows * job->columns);
  long top = at_tile / job->columns * OUT - job->pad, left = at_tile % job->columns * OUT - job->pad;
  for (long tap = 0; tap < job->taps; tap++) {
    long number = image % job->frames + tap - job->front;
    const void *frame = find_frame(job, image / job->frames, number, is_bf16);
    read_frame(job, frame, top, left, to + tap * job->channels, plane, is_bf16);
  }
}

/* Writes one tile of `count` output channels from `first` on. */
INLINE void write_tile(const Convolution *job, long tile, const float *from, long plane, long first,
                       long count, int is_bf16) {
  long image = tile / (job->rows * job->columns), at_tile = tile % (job->rows * job->columns);
  long top = at_tile / job->columns * OUT, left = at_tile % job->columns * OUT;
  for (long c = 0; c < count; c += LANES) {
    floats half[OUT * SIDE], bias = job->bias ? load(job->bias, first + c, count - c, 0) : all(0);
    for (int j = 0; j < SIDE; j++) {
      floats m[SIDE];
      for (int i = 0; i < SIDE; i++) m[i] = load_lanes(from + (i * SIDE + j) * plane + c, 0);
      transform_output(m, half + j, SIDE);
    }
    for (int i = 0; i < OUT && top + i < job->height; i++) {
      floats line[OUT];
      transform_output(half + i * SIDE, line, 1);
      long place = ((image * job->height + top + i) * job->width + left) * job->outputs + first + c;
      for (int j = 0; j < OUT && left + j < job->width; j++)
        store(job->y, place + j * job->outputs, count - c, line[j] + bias, is_bf16);
    }
  }
}

/* A tile over time is OUT frames of a pixel: pixels first, then tiles of frames, then samples. */
typedef struct {
  long sample, frame, pixel;
} Place;

INLINE Place place_of(const Convolution *job, long tile) {
  long above = tile / job->columns;
  return (Place){above / job->rows, above % job->rows * OUT, tile % job->columns};
}

/* The transformed inputs of a tile over time: a row of channels, `plane` apart. */
INLINE void read_pixel(const Convolution *job, long tile, float *to, long plane, int is_bf16) {
  Place at_tile = place_of(job, tile);
  for (long c = 0; c < job->channels; c += LANES) {
    floats d[SIDE], whole[SIDE];
    for (int i = 0; i < SIDE; i++) {
      long frame = at_tile.frame + i - job->front;
      long row = (at_tile.sample * job->from_frames + frame) * job->columns + at_tile.pixel;
      d[i] = frame >= 0 && frame < job->from_frames
                 ? load(job->x, row * job->channels + c, job->channels - c, is_bf16)
                 : all(0);
    }
    transform_input(d, whole, 1);
    for (int f = 0; f < SIDE; f++) memcpy(to + f * plane + c, &whole[f], sizeof whole[f]);
  }
}

/* Writes a tile over time: `count` output channels from `first` on. */
INLINE void write_pixel(const Convolution *job, long tile, const float *from, long plane,
                        long first, long count, int is_bf16) {
  Place at_tile = place_of(job, tile);
  for (long c = 0; c < count; c += LANES) {
    floats m[SIDE], line[OUT];
    floats bias = job->bias ? load(job->bias, first + c, count - c, 0) : all(0);
    for (int i = 0; i < SIDE; i++) m[i] = load_lanes(from + i * plane + c, 0);
    transform_output(m, line, 1);
    for (int j = 0; j < OUT && at_tile.frame + j < job->frames; j++) {
      long frame = at_tile.sample * job->frames + at_tile.frame + j;
      long row = frame * job->columns + at_tile.pixel;
      store(job->y, row * job->outputs + first + c, count - c, line[j] + bias, is_bf16);
    }
  }
}

static int convolve(const Convolution *job, int is_over_time, int is_bf16, int threads) {
  const long area = is_over_time ? SIDE : AREA;
  long block = MOST_WEIGHTS / (area * job->inputs) / PANEL * PANEL;
  block = smaller(block < LEAST_PANELS * PANEL ? LEAST_PANELS * PANEL : block,
                  round_up(job->outputs, PANEL));
  long a_step = odd_lines(job->inputs), c_step = odd_lines(block);
  long piece = MOST_NUMBERS / (area * (a_step + c_step)) / ROWS * ROWS;
  long least = area * job->inputs * block <= MOST_WEIGHTS ? FEW_TILES : MANY_TILES;
  piece = smaller(piece < least ? least : piece,
                  round_up((job->tiles + threads - 1) / threads, ROWS));
  long a_plane = odd_lines(piece * a_step), c_plane = odd_lines(piece * c_step);
  long pieces = (job->tiles + piece - 1) / piece;
  float *weights = scratch_of(area * odd_lines(job->inputs * block));
  float *scratch = scratch_of(threads * area * (a_plane + c_plane));
  if (!weights || !scratch) {
    free(weights), free(scratch);
    return 1;
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float *a = scratch + this_thread() * area * (a_plane + c_plane), *c = a + area * a_plane;
    for (long first = 0; first < job->outputs; first += block) {
      long count = smaller(block, job->outputs - first), panels = (count + PANEL - 1) / PANEL;
      long plane = odd_lines(job->inputs * panels * PANEL);
#pragma omp for schedule(static)
      for (long i = 0; i < panels * job->inputs; i++)
        BY_KIND(weight_panel, job, first + i / job->inputs * PANEL, i % job->inputs,
                weights + i * PANEL, plane, is_over_time);
#pragma omp for schedule(static)
      for (long p = 0; p < pieces; p++) {
        long start = p * piece, many = smaller(piece, job->tiles - start);
        for (long t = 0; t < many; t++)
          if (is_over_time)
            BY_KIND(read_pixel, job, start + t, a + t * a_step, a_plane);
          else
            BY_KIND(read_tile, job, start + t, a + t * a_step, a_plane);
        /* Rows that are left over: zeros, as what lies there may be slow. */
        for (int f = 0; f < area && many % ROWS; f++)
          memset(a + f * a_plane + many * a_step, 0, (ROWS - many % ROWS) * a_step * sizeof(float));
        for (int f = 0; f < area; f++)
          for (long n = 0; n < panels; n++)
            for (long t = 0; t < many; t += ROWS)
              product(a + f * a_plane + t * a_step, a_step,
                      weights + f * plane + n * job->inputs * PANEL, job->inputs,
                      c + f * c_plane + t * c_step + n * PANEL, c_step, COLUMNS, 0);
        for (long t = 0; t < many; t++)
          if (is_over_time)
            BY_KIND(write_pixel, job, start + t, c + t * c_step, c_plane, first, count);
          else
            BY_KIND(write_tile, job, start + t, c + t * c_step, c_plane, first, count);
      }
    }
  }
  free(weights), free(scratch);
  return 0;
}

/* 0, or 1 if there is no memory. The images are channels last, `from` the frames, rows and columns
   of a sample of x and `to` of one of y; the weight has these strides. Of images, not frames, a
   sample has one frame and one tap. */
EXPORT int winograd(const void *x, const void *weight, const float *bias, void *y, long samples,
                    const long *from, const long *to, long channels, long outputs, long taps,
                    long front, long pad, const void *history, long earlier, int repeats_frames,
                    int pixels, const long *strides, int is_bf16, int threads) {
  long rows = (to[1] + OUT - 1) / OUT, columns = (to[2] + OUT - 1) / OUT;
  Convolution job = {
      .x = x, .weight = weight, .bias = bias, .y = y,
      .height = to[1], .width = to[2], .outputs = outputs,
      .from_height = from[1], .from_width = from[2], .channels = channels,
      .frames = to[0], .from_frames = from[0], .taps = taps, .front = front, .pad = pad,
      .history = history, .earlier = earlier, .repeats_frames = repeats_frames,
      .pixels = pixels, .inputs = taps * channels,
      .rows = rows, .columns = columns, .tiles = samples * to[0] * rows * columns,
      .stride_out = strides[0], .stride_in = strides[1], .stride_t = strides[2],
      .stride_y = strides[3], .stride_x = strides[4],
  };
  return convolve(&job, 0, is_bf16, threads);
}

/* The same over time, of samples of `from` frames of so many pixels, to so many frames. */
EXPORT int winograd_over_time(const void *x, const void *weight, const float *bias, void *y,
                              long samples, long from, long to, long pixels, long channels,
                              long outputs, long front, const long *strides, int is_bf16,
                              int threads) {
  long rows = (to + OUT - 1) / OUT;
  Convolution job = {
      .x = x, .weight = weight, .bias = bias, .y = y, .outputs = outputs, .channels = channels,
      .frames = to, .from_frames = from, .front = front, .inputs = channels,
      .rows = rows, .columns = pixels, .tiles = samples * rows * pixels,
      .stride_out = strides[0], .stride_in = strides[1], .stride_t = strides[2],
  };
  return convolve(&job, 1, is_bf16, threads);
}

#undef A
#undef B
#undef A2
#undef B2
