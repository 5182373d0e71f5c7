"""`swarmq train --offline`: an agent and its reward without broker, engine and learner, on recorded or scripted answers.

recording.py   what was recorded, and the recorded prompt that is most like another one
engine.py      an engine that gives the recorded answers
run.py         client, proxy and agents in this process, and what is printed of each episode

The client and the proxy are the real ones, so that an agent sees what it sees in a run. Nothing but the command line imports this
package.
"""
