#include "confusion_loss.cuh"

#include "launch.cuh"

namespace sk {

void confusion_loss(const LaunchOn& on, const Problem& p, const Targets& targets, const Gradients& gradients,
                    const ConfusionLoss& f, int64_t blocks) {
    if (p.batch == 0 || p.labels == 0) return;
    with_kind(p.dtype, [&](auto kind) {
        using K = decltype(kind);
        using Acc = typename K::Acc;
        constexpr int bytes = ConfusionShared<K>::bytes;
        ConfusionLossArgs<K> args{};
        args.tile = tile_args<K>(p, bytes);
        args.targets = target_args<K>(targets);
        args.gradients = gradient_args<K>(gradients);
        args.loss = f.loss;
        args.beta = static_cast<const Acc*>(f.beta), args.eta = static_cast<const Acc*>(f.eta);
        args.logits = static_cast<Acc*>(f.logits);
        args.values = f.values, args.grad_beta = f.grad_beta, args.grad_eta = f.grad_eta;
        launch(on, "confusion_loss", confusion_loss_kernel<K>, dim3(static_cast<unsigned>(blocks)),
               bytes + args.tile.resident_bytes(), args);
    });
}

int64_t confusion_loss_shared_bytes(DType dtype) {
    int64_t bytes = 0;
    with_kind(dtype, [&](auto kind) { bytes = ConfusionShared<decltype(kind)>::bytes; });
    return bytes;
}

}  // namespace sk
