// One forward of Wan's transformer by stable-diffusion.cpp, with a C interface for `sdcpp.py`.
//
// Its runner knows the released sizes alone, by the number of blocks. It is begun with those of the
// smallest model and given others before its weights have memory.

#include <map>
#include <string>

#include "model.h"
#include "wan.hpp"

namespace {

const std::string PREFIX = "model.diffusion_model";

String2TensorStorage with_thirty_blocks(String2TensorStorage tensors) {
    tensors[PREFIX + ".blocks.29.modulation"] = TensorStorage();
    return tensors;
}

struct Transformer : WAN::WanRunner {
    Transformer(ggml_backend_t backend, const String2TensorStorage& tensors, int heads, int layers, int ffn)
        : WanRunner(backend, false, with_thirty_blocks(tensors), PREFIX) {
        free_params_ctx();
        alloc_params_ctx();
        wan_params.num_heads  = heads;
        wan_params.dim        = heads * 128;
        wan_params.ffn_dim    = ffn;
        wan_params.num_layers = layers;
        wan                   = WAN::Wan(wan_params);
        wan.init(params_ctx, tensors, PREFIX);
    }
};

}  // namespace

extern "C" {

// Load a safetensors file; weight_type is a ggml_type. Null if it can't be loaded.
void* wan_load(const char* path, int heads, int layers, int ffn, int weight_type, int flash) {
    ModelLoader loader;
    if (!loader.init_from_file_and_convert_name(path, PREFIX + ".")) {
        return nullptr;
    }
    auto& tensors = loader.get_tensor_storage_map();
    for (auto& [name, tensor] : tensors) {
        if (ends_with(name, "weight")) {
            tensor.expected_type = static_cast<ggml_type>(weight_type);
        }
    }
    auto* model = new Transformer(ggml_backend_cpu_init(), tensors, heads, layers, ffn);
    model->set_flash_attention_enabled(flash != 0);
    std::map<std::string, ggml_tensor*> places;
    if (!model->alloc_params_buffer()) {
        return nullptr;
    }
    model->get_param_tensors(places, PREFIX);
    return loader.load_tensors(places) ? model : nullptr;
}

// Latents (16, T, H, W), a timestep and a text (L, 4096) to a velocity (16, T, H, W).
int wan_forward(void* handle, int threads, const float* x, const int64_t* thw, float timestep,
                const float* text, int64_t length, float* velocity) {
    std::vector<int64_t> shape = {thw[2], thw[1], thw[0], 16};
    sd::Tensor<float> latents(shape, std::vector<float>(x, x + sd::tensor_numel(shape)));
    sd::Tensor<float> context({4096, length}, std::vector<float>(text, text + 4096 * length));
    sd::Tensor<float> t({1}, std::vector<float>{timestep});
    auto made = static_cast<Transformer*>(handle)->compute(threads, latents, t, context);
    if (made.numel() != latents.numel()) {
        return 1;
    }
    std::copy(made.data(), made.data() + made.numel(), velocity);
    return 0;
}

}
