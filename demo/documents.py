"""The documents of the demonstration `--rag`, and questions that need two of them each."""

from __future__ import annotations

DOCUMENTS = (
    """\
Lighthouses of the Varda coast. There are five lights between Oster and Kell. The tallest is Skarn
Light, a white tower of 47 metres on Skarn Rock, built in 1881. Its keeper is Marta Lindqvist, who
came to the rock nine years ago and looks after the lamp, the fog horn and two goats. The lamp
turns once in twelve seconds and is seen from 24 sea miles away. The other four lights have no
keepers any more: they are switched on by a clock and visited twice a year by a boat of the coast
office.
""",
    """\
Marta Lindqvist, portrait of a neighbour. Marta Lindqvist was born in the village of Hallen, where
her parents had a bakery. She learned to repair clocks in Oster and played the trumpet in the town
band. She speaks four languages, and on winter evenings she paints small pictures of ships, which
she gives away at Christmas. Asked what she misses most, she says: fresh rolls on a Sunday, and
trees.
""",
    """\
The ferry Dorothea. The ferry Dorothea runs between Kell and the islands on every day but Monday.
It carries ninety passengers and six cars. The captain is Emil Brandt, a quiet man with a red
beard, who has never missed a crossing. In the galley they sell pea soup, and on Fridays fish
cakes. Dogs travel free of charge, bicycles cost two crowns, and a goat counts as a dog if it is
kept on a rope.
""",
    """\
Emil Brandt retires. After thirty years at the wheel, captain Emil Brandt will go ashore in May.
He wants to live in Tromby, in the yellow house of his grandmother, and to keep bees. His last
crossing will be free for all passengers. The company has not said who follows him, but the mate,
Sofia Ruiz, has been seen to measure the captain's chair.
""",
    """\
The market of Oster. The market is held on Tuesdays and Saturdays from seven until one. There is
fish from the night's catch, bread, cheese, wool and second-hand tools. The stall with the longest
queue sells waffles with cloudberries. In the year 1903 a whale lay in the harbour, and the market
was moved to the churchyard for three weeks. Since then the town's arms show a whale with a
basket.
""",
)

QUESTION = "In which village was the keeper of Skarn Light born?"
INSTRUCTION = "Answer the question from these documents."
FORM = "Answer in one sentence."
