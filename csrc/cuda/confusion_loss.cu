#include "confusion_loss.cuh"

#include "launch.cuh"

namespace sk {

void confusion_loss(const LaunchOn& on, const Problem& p, const Targets& targets, const Gradients& gradients,
                    const ConfusionLoss& f, int64_t blocks) {
    with_work(p, [&](auto kind) {
        using K = decltype(kind);
        using Acc = typename K::Acc;
        launch_loss(on, "confusion_loss", confusion_loss_kernel<K>, p, targets, gradients, blocks,
                    ConfusionShared<K>::bytes, kind, [&](ConfusionLossArgs<K>& args) {
                        args.loss = f.loss;
                        args.beta = static_cast<const Acc*>(f.beta), args.eta = static_cast<const Acc*>(f.eta);
                        args.logits = static_cast<Acc*>(f.logits);
                        args.values = f.values, args.grad_beta = f.grad_beta, args.grad_eta = f.grad_eta;
                    });
    });
}

int64_t confusion_loss_shared_bytes(DType dtype) {
    return by_kind(dtype, [](auto kind) { return ConfusionShared<decltype(kind)>::bytes; });
}

}  // namespace sk
