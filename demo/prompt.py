"""The prompt of the demonstration: a text with facts in it, and a question about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_cascade.demo.errors import DemoError

TEXT = """\
Handbook of the Merrow Island weather station, given to everybody who stays the winter.

1. The place. Merrow Island lies eleven kilometres off the coast. It is two kilometres long, shaped
like a boot, and nobody lives on it except the crew of the station. The main house stands on the
heel, where the wind is weakest. The old lighthouse stands on the toe; its lamp was put out in 1974
and the tower now carries our antenna. Between the two runs a gravel path of 1,600 steps, marked by
white poles, because in fog you cannot see from one pole to the next. Walk it with one hand on the
rope. There are no trees. The highest point, Gull Hill, is 84 metres above the sea, and from there
you can see the whole coast on a clear day.

2. The crew. Four people spend the winter here. The station leader is Ingrid Holm, who has done
seven winters and keeps the log. Tomas Reyes is the mechanic and looks after both generators. Aiko
Mori launches the balloons and checks the instruments. The fourth place is for a guest, usually a
student, who cooks on Sundays and helps where help is needed. On other days the crew cooks in turn,
and whoever cooks does not wash up.

3. The day. The day begins at half past five, when Aiko reads the thermometers in the white screen
behind the house. She reads them again at noon and at six in the evening. The readings go by radio
to the mainland within ten minutes, since the ferries wait for them. A balloon goes up each day at
eleven; on stormy days it is launched from the lee of the boat shed. It carries a small orange box
that measures pressure, temperature and humidity up to about thirty kilometres, where the balloon
bursts. If you find an orange box on the beach, bring it home: there is a number in the lid, and the
person who finds one gets the first slice of the Sunday cake.

4. Power. Two diesel generators stand in the red shed. Only one runs at a time. They change over
every Wednesday, so that both stay dry. The tank holds 9,000 litres, which lasts for about five
months. Six solar panels on the south roof charge the batteries of the radio, and the radio works
for three days even if both generators fail. Never dry clothes on the generators. In the winter of
2003 a burning glove stopped the station for two days, and the crew melted snow over candles.

5. Water and food. Rain from the roof runs into a cistern under the kitchen. It is good to drink
after it has passed the two filters, which Tomas changes on the first day of each month. The supply
boat, the Petrel, comes every third Friday if the waves are lower than two metres. It brings mail,
fresh vegetables and fuel, and takes the rubbish away. There is always food for sixty days in the
cellar: rice, beans, tinned fish, dried apples and far too much oatmeal. The hens lay about five
eggs a day in autumn and none in January.

6. Animals. About two thousand pairs of puffins nest on the western cliff from April until August.
Do not go closer than thirty metres. The grey seals have their young on the south beach in November,
and then the beach is closed to everyone. The station cat is called Barometer. She is allowed in
every room except the radio room, because in her first winter she slept on the transmitter and
cut us off from the mainland for a night.

7. Safety. If the siren sounds once, come to the main house. If it sounds three times, go to the
boat shed and put on a survival suit; the suits hang on the left, sorted by size. Nobody leaves the
house alone after dark, and everyone who goes farther than Gull Hill takes a radio and writes the
time in the book beside the door. The doctor on the mainland answers on channel 16 at any hour. The
helicopter needs forty minutes from the harbour and can land only on the flat ground behind the
house, so keep that ground free of ropes, buckets and hens.

8. The end of winter. On the last evening the crew plants a pole with its names at the end of the
gravel path. There are 58 poles so far. The oldest one that can still be read says: Wind from the
north-west, soup from the day before, all well."""

QUESTION = "Write a short letter home in which a guest describes one ordinary day on Merrow Island."


def build(tokenizer: Any, file: str | None, length: int | None) -> Tensor:
    """The prompt's tokens.

    Args:
        tokenizer: a transformers tokenizer; its chat template is used where it has one.
        file: text to read instead of the built-in one.
        length: exactly so many tokens, by cutting the text or repeating it.

    Returns:
        int64 [1, L], L >= 2.

    Raises:
        DemoError: the file cannot be read, or holds fewer than two tokens.
    """
    text = f"{TEXT}\n\n{QUESTION}" if file is None else _read(file)
    if tokenizer.chat_template is None:
        tokens = tokenizer(text)["input_ids"]
    else:
        message = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True
        )
        tokens = rendered["input_ids"]
    if length is not None and tokens:
        tokens = (tokens * (1 + length // len(tokens)))[:length]
    if len(tokens) < 2:
        raise DemoError(f"the prompt has {len(tokens)} tokens, at least two are needed")
    return torch.tensor([tokens])


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"cannot read the prompt: {error}") from error
